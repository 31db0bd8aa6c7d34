"""The pace of a member: how long its program computes between two calls."""

from __future__ import annotations

import time

# The share of the newest pause in the pace, which says little before so many pauses.
_SHARE, _LEAST_PAUSES = 0.2, 10


class Pace:
    """A moving average of the time between two calls of a program."""

    def __init__(self) -> None:
        self._average_s = 0.0
        self._pauses = 0
        self._ended: float | None = None

    def begin(self) -> None:
        """Note that a call begins."""
        if self._ended is not None:
            pause_s = time.monotonic() - self._ended
            self._average_s += (_SHARE if self._pauses else 1.0) * (pause_s - self._average_s)
            self._pauses += 1

    def end(self) -> None:
        """Note that a call has ended."""
        self._ended = time.monotonic()

    def seconds(self) -> float:
        """Return the time between two calls; 0 before there were enough of them."""
        return self._average_s if self._pauses >= _LEAST_PAUSES else 0.0
