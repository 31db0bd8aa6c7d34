"""The program of spawned workers: ``python -m mpi4py.futures.server``, which `channels.SpawnedChannel` starts."""

from __future__ import annotations

import sys

from unisono.compat.mpi4py import MPI
from unisono.compat.mpi4py.futures.pool import serve_comm


def main() -> None:
    """Serve the job that has spawned this one."""
    parent = MPI.Comm.Get_parent()  # type: ignore[attr-defined]
    if not parent:
        sys.exit("mpi4py.futures.server runs only in a job that an executor has started")
    serve_comm(parent, MPI.COMM_WORLD)  # type: ignore[attr-defined]
    parent.Disconnect()


if __name__ == "__main__":
    main()
