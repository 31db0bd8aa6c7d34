"""The program of spawned workers: ``python -m mpi4py.futures.server``, which `channels.SpawnedChannel` starts."""

from __future__ import annotations

import sys

from unisono.compat.mpi4py import MPI
from unisono.compat.mpi4py.calls.messages import Port
from unisono.compat.mpi4py.futures import worker
from unisono.launchers.spawn import parent


def main() -> None:
    """Serve the job that has spawned this one."""
    bridge = parent(MPI.COMM_WORLD._live.native)  # type: ignore[attr-defined]
    if bridge is None:
        sys.exit("mpi4py.futures.server runs only in a job that an executor has started")
    with bridge:
        worker.serve(Port(bridge.union, for_objects=True), bridge.remote[0], MPI.COMM_WORLD)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
