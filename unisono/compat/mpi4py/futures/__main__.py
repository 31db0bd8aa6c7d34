"""``python -m mpi4py.futures program.py``: rank 0 runs the program, and the other ranks are workers of its executors.

The program is a file, ``-m`` and a module, ``-c`` and a text, or ``-`` for the standard input.
"""

from __future__ import annotations

import functools
import sys
import traceback
from typing import Any

from unisono.compat.mpi4py import MPI, run
from unisono.compat.mpi4py.futures import pool
from unisono.compat.mpi4py.futures.channels import CommChannel, ThreadChannel
from unisono.compat.mpi4py.futures.tasks import Welcome
from unisono.compat.mpi4py.futures.workers import Workers


def _channel(between: Any) -> Any:
    channel = CommChannel(between)
    for worker in range(channel.size):
        channel.send(worker, Welcome.of({}))
    return channel


def main() -> None:
    """Run the program on rank 0, and tasks on the other ranks."""
    world = MPI.COMM_WORLD  # type: ignore[attr-defined]
    open_channel = functools.partial(ThreadChannel, 1)
    if world.Get_size() > 1:
        between, workers = pool.comm_split(world, 0)
        if workers:
            pool.serve_comm(between, workers)
            return
        open_channel = functools.partial(_channel, between)
    pool.shared = Workers(open_channel, lasts=True)
    if status := _run():
        world.Abort(status)
    pool.shared.close()


def _run() -> int:
    """Run the program, and return its exit code."""
    words = ["-c", sys.stdin.read(), *sys.argv[2:]] if sys.argv[1:2] == ["-"] else sys.argv[1:]
    try:
        run.main(words)
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return 0 if end.code is None else end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - functions of the program raise any error
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
