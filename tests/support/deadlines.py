"""How tests wait: for what has happened, not for a time, and so long that only what hangs is ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

# Far more than anything takes on a machine that has ten times too much to do. A test has three times as much in all.
DEADLINE_S = 100.0
_PAUSE_S = 0.002


def eventually(condition: Callable[[], object]) -> bool:
    """Wait until `condition` holds, for `DEADLINE_S` at most; return whether it came to hold."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)
    return True


def leave_mark(folder: Path, name: object) -> None:
    """Tell other processes that use `folder` that something has happened, without the library that is tested."""
    (folder / f"mark {name}").touch()


def await_marks(folder: Path, *names: object) -> None:
    """Wait until each of these marks has been left in `folder`."""
    marks = [folder / f"mark {name}" for name in names]
    assert eventually(lambda: all(mark.exists() for mark in marks)), f"no {marks} yet"
