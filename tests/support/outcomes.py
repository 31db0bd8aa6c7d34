"""The errors of calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

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
