"""One rank of `unisono.bench.studies.faults`: makes some collectives, and then the fault that its argument names.

Run by path as ``faulty_rank.py FAULT``, as each of three ranks. Rank 0 prints "ready" before the fault.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import numpy as np

import unisono as un

CULPRIT = 1
STEPS = 5
SLOW_STEP_S = 5.0
LARGE_COUNT = 1 << 19  # 2 MiB: some seconds on the slow link


def mismatched(world: un.Communicator, x: np.ndarray) -> None:
    """The culprit calls a barrier instead of an allreduce."""
    if world.rank == CULPRIT:
        world.barrier()
    else:
        world.allreduce(x, out=x)


def skipping(world: un.Communicator, x: np.ndarray) -> None:
    """The culprit skips one of several equal collectives, so it is in later work when the others make the last one."""
    for step in range(STEPS):
        if (world.rank, step) != (CULPRIT, 2):
            world.allreduce(x, out=x)
    time.sleep(100)


def looping(world: un.Communicator, x: np.ndarray) -> None:
    """The culprit is in an endless loop of its own."""
    while world.rank == CULPRIT:
        pass
    world.allreduce(x, out=x)


def stopping(world: un.Communicator, x: np.ndarray) -> None:
    """The culprit is stopped by SIGSTOP."""
    if world.rank == CULPRIT:
        os.kill(os.getpid(), signal.SIGSTOP)
    world.allreduce(x, out=x)


def dying(world: un.Communicator, x: np.ndarray) -> None:
    """The culprit is killed by SIGKILL."""
    if world.rank == CULPRIT:
        os.kill(os.getpid(), signal.SIGKILL)
    world.allreduce(x, out=x)


def sending_much(world: un.Communicator, x: np.ndarray) -> None:
    """All ranks reduce a large array again and again."""
    large = np.ones(LARGE_COUNT, np.float32)
    for _ in range(STEPS):
        world.allreduce(large)


def computing_long(world: un.Communicator, x: np.ndarray) -> None:
    """The culprit computes for long in each step."""
    for _ in range(STEPS):
        if world.rank == CULPRIT:
            time.sleep(SLOW_STEP_S)
        world.allreduce(x, out=x)


def receiving_in_a_cycle(world: un.Communicator, x: np.ndarray) -> None:
    """Each rank receives from the next one before it sends."""
    world.recv(x, (world.rank + 1) % world.size)


def ordering_wrongly(world: un.Communicator, x: np.ndarray) -> None:
    """Ranks 0 and 1 use two communicators in another order."""
    first, second = world.dup(), world.dup()
    for each in (second, first) if world.rank == CULPRIT else (first, second):
        each.allreduce(x, out=x)


def raising(world: un.Communicator, x: np.ndarray) -> None:
    """The culprit raises an exception."""
    if world.rank == CULPRIT:
        raise ValueError("this sample is broken")
    world.allreduce(x, out=x)


FAULTS: dict[str, Callable[[un.Communicator, np.ndarray], None]] = {
    function.__name__: function
    for function in (
        mismatched,
        skipping,
        looping,
        stopping,
        dying,
        sending_much,
        computing_long,
        receiving_in_a_cycle,
        ordering_wrongly,
        raising,
    )
}


def main() -> None:
    """Run as one rank, which meets the others and then commits the fault named on the command line."""
    world = un.init()
    x = np.ones(8, np.float32)
    for _ in range(3):
        world.allreduce(x, out=x)
    if world.rank == 0:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
    FAULTS[sys.argv[1]](world, x)
    world.close()


if __name__ == "__main__":
    main()
