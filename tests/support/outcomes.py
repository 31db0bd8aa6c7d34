"""The errors of calls, and the output of ranks that survive another one."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from support.deadlines import DEADLINE_S

import unisono as un


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the class and the text of the error that `call` raises; both are "" if it raises none.

    It catches errors of Unisono, and KeyboardInterrupt, because some tests send SIGINT. Other exceptions pass.
    """
    try:
        call()
    except (un.UnisonoError, KeyboardInterrupt) as error:
        return type(error).__name__, str(error)
    return "", ""


def fail(world: un.Communicator) -> str:
    """Call until a call fails; return the class of the error."""
    try:
        while True:
            world.allreduce(np.ones(100))
    except un.UnisonoError as error:
        return type(error).__name__


def summed(world: un.Communicator, value: int) -> int:
    """Return the sum of `value` over all ranks, by several collectives that must agree."""
    total = world.allreduce(np.full(1000, value, np.int64))
    assert (total == world.allgather(np.array([value])).sum()).all()
    world.barrier()
    return int(total[0])


def survivors_of_rank_1(program: str, *words: str) -> list[str]:
    """Run a program on three ranks, of which rank 1 kills itself. Return the standard output of ranks 0 and 2.

    The arguments of the program are its rank and `words`. Ranks 0 and 2 must end with exit code 0.
    """
    ranks = [
        subprocess.Popen([sys.executable, "-c", program, str(rank), *words], stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    try:
        outputs = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, -signal.SIGKILL, 0]
    return [outputs[0], outputs[2]]
