"""Open MPI, MPICH and Intel MPI, in the way of mpi4py's users: upper-case methods on numpy arrays."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any


class MpiAdapter:
    """The world communicator of the MPI library that mpi4py has loaded."""

    def __init__(self) -> None:
        self._mpi = importlib.import_module("mpi4py.MPI")
        self._world = self._mpi.COMM_WORLD
        self.size = self._world.size
        first_line = self._mpi.Get_library_version().partition("\n")[0]
        self.version = " ".join(first_line.partition(",")[0].strip("\0").split())
        self.barrier = self._world.Barrier

    def call(self, collective: str, array: Any, out: Any) -> Callable[[], object]:
        """Return the call to measure. Calls are blocking, and in place if MPI has an in-place form."""
        try:
            self._mpi.Datatype.fromcode(array.dtype.char)
        except ValueError:
            raise NotImplementedError(f"mpi4py has no MPI datatype for {array.dtype}") from None
        is_root = self._world.rank == 0
        reduced = (self._mpi.IN_PLACE, array) if is_root else (array, None)
        calls: dict[str, Callable[[], object]] = {
            "allreduce": partial(self._world.Allreduce, self._mpi.IN_PLACE, array, self._mpi.SUM),
            "reduce": partial(self._world.Reduce, *reduced, self._mpi.SUM, 0),
            "broadcast": partial(self._world.Bcast, array, 0),
            "scan": partial(self._world.Scan, self._mpi.IN_PLACE, array, self._mpi.SUM),
            "gather": partial(self._world.Gather, array, out if is_root else None, 0),
            "scatter": partial(self._world.Scatter, array if is_root else None, out, 0),
            "allgather": partial(self._world.Allgather, array, out),
            "reduce_scatter": partial(self._world.Reduce_scatter_block, array, out, self._mpi.SUM),
            "alltoall": partial(self._world.Alltoall, array, out),
            "barrier": self._world.Barrier,
        }
        return calls[collective]

    def close(self) -> None:
        """Finalise MPI."""
        self._mpi.Finalize()


connect = MpiAdapter
