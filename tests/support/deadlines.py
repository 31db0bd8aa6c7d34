"""Waiting in tests: a test waits for an event, never for a time, and gives up after `DEADLINE_S`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

# Nothing takes as long, even on a machine with ten times too much work. So only a test that hangs reaches it. pytest
# ends a whole test after three times as long.
DEADLINE_S = 100.0
_PAUSE_S = 0.002


def eventually(condition: Callable[[], object]) -> bool:
    """Wait until `condition` holds, for `DEADLINE_S` at most; return whether it holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)
    return True


def leave_mark(folder: Path, name: object) -> None:
    """Create the mark `name` in `folder`, which processes await by `await_marks`. It uses no tested code."""
    (folder / f"mark {name}").touch()


def has_mark(folder: Path, name: object) -> bool:
    """Return whether `leave_mark` has created the mark `name` in `folder`."""
    return (folder / f"mark {name}").exists()


def await_marks(folder: Path, *names: object) -> None:
    """Wait until `leave_mark` has created all marks `names` in `folder`."""
    assert eventually(lambda: all(has_mark(folder, name) for name in names)), f"not all of {names} in {folder} yet"
