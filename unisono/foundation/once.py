"""`once_per_process`: values that a process makes once, whichever of its threads needs them first.

`functools.cache` does not do that: threads that call at the same moment each run the function, and each gets another
value. That matters where the value is an identity, or where making it opens, registers or writes something.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Value = TypeVar("Value")


def once_per_process(make: Callable[..., Value]) -> Callable[..., Value]:
    """Return a function that returns ``make(*arguments)``, which this process calls once for the same arguments.

    Of threads that call it at the same moment, one makes the value, and the others wait for it. A forked child makes
    values of its own. If `make` raises an error, nothing is kept. Arguments must be positional and hashable.
    """
    of_process: dict[int, _Made] = {}

    @functools.wraps(make)
    def made(*arguments: Any) -> Value:
        # A child may be forked while a thread of its parent has the lock, so it has a lock of its own.
        mine = of_process.get(os.getpid()) or of_process.setdefault(os.getpid(), _Made())
        if arguments not in mine.values:
            with mine.lock:
                if arguments not in mine.values:
                    mine.values[arguments] = make(*arguments)
        value: Value = mine.values[arguments]
        return value

    return made


class _Made:
    """The values that one process has made, by the arguments of their functions."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.values: dict[tuple[Any, ...], Any] = {}
