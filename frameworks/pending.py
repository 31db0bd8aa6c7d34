"""`Pending`: the methods that the frameworks need of a call in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Pending(Protocol):
    """A call of Unisono that may still be in flight. `unisono.Work` is one."""

    def done(self) -> bool:
        """Return whether the call has ended, with or without an error."""

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait until the call has ended, and raise its error if it failed."""

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback(pending)`` when the call has ended, in any thread."""
