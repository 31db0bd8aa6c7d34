"""`FailureCalls`: the calls of communicators that programs make after processes have failed (ULFM).

An error of Unisono ends a call on all ranks, so no rank has to revoke a communicator.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.compat.mpi4py.base.errors import LOST, translating
from unisono.compat.mpi4py.calls.ready import Native
from unisono.compat.mpi4py.calls.request import Request
from unisono.compat.mpi4py.memory.access import memory_of
from unisono.compat.mpi4py.values.group import Group


class FailureCalls:
    """The methods of `Comm` for failed processes."""

    __slots__ = ()
    _live: Any

    def Revoke(self) -> None:
        """Raise `NotImplementedError`: a call that fails does so on all ranks, and `Abort` ends the job."""
        raise NotImplementedError("communicators are not revoked, because a call that fails does so on all ranks")

    def Is_revoked(self) -> bool:
        """Return False."""
        self._live  # noqa: B018
        return False

    def Get_failed(self) -> Any:
        """Return the empty group.

        Raises:
            NotImplementedError: a call of this process has reported the loss of a rank, whose error names it.
        """
        self._live  # noqa: B018
        if LOST:
            raise NotImplementedError(f"the error of the call names the rank that has failed: {LOST[-1]}")
        return Group._with(())

    def Ack_failed(self, num_to_ack: int | None = None) -> int:
        """Return how many of the failed ranks, at most the number that is passed, are known."""
        known = int(self.Get_failed().size)
        return known if num_to_ack is None else min(num_to_ack, known)

    @translating
    def Agree(self, flag: int) -> int:
        """Return the bitwise "and" of the flags of all ranks."""
        return int(self._agreement().allreduce(np.array([flag]), op="band")[0])

    @translating
    def Iagree(self, flag: Any) -> Any:
        """Start to set an integer in memory to the bitwise "and" of those of all ranks. Returns a request."""
        memory = memory_of(flag, writable=True)
        if memory.size != np.dtype(np.intc).itemsize:
            raise ValueError(f"expecting the memory of one int, not {memory.size} bytes")
        array = memory.view(np.intc)
        return Request._of(Native(self._agreement().allreduce, (array, "band"), {"out": array}).start())

    def _agreement(self) -> Any:
        """Return a communicator of all ranks for agreements alone, because they have no order with other calls."""
        state = self._live
        return (state if state.remote is None else state.bridge).agreement
