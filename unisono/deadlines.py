"""Deadlines and limits of time: the one place that checks them and counts the seconds that are left."""

from __future__ import annotations

import time
from numbers import Real

from unisono.errors import UsageError

# Sockets, selectors and locks raise OverflowError above 2^31 ms, which are 24.8 days; a single wait is shorter.
LONGEST_WAIT_S = 2_000_000.0
# A socket takes 0 for "do not block", and a call refuses it.
SHORTEST_WAIT_S = 0.001


class Deadline:
    """A moment by which something must have ended.

    Args:
        timeout_s: seconds from now; infinity for no limit.

    Attributes:
        when: the moment, in seconds of `time.monotonic`.

    >>> Deadline(float("inf")).left_s(), Deadline(0.0).left_s()
    (2000000.0, 0.001)
    """

    __slots__ = ("when",)

    def __init__(self, timeout_s: float) -> None:
        self.when = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Return the seconds until the deadline as one wait takes them: `SHORTEST_WAIT_S` to `LONGEST_WAIT_S`."""
        return min(max(SHORTEST_WAIT_S, self.when - time.monotonic()), LONGEST_WAIT_S)

    def remaining_s(self) -> float:
        """Return the same; raises TimeoutError if the deadline has passed."""
        if self.has_passed():
            raise TimeoutError("timed out")
        return self.left_s()

    def has_passed(self) -> bool:
        """Return whether the moment is over."""
        return time.monotonic() >= self.when


def seconds(value: object, *, or_zero: bool = False) -> float:
    """Return a limit of time as a float; it may be infinite.

    Raises:
        ValueError: it is no positive number (`or_zero`: no number of 0 or more); the message says what it must be.

    >>> seconds(30), seconds(float("inf"))
    (30.0, inf)
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if is_number and (value > 0 or (or_zero and value == 0)):  # type: ignore[operator]
        try:
            return float(value)  # type: ignore[arg-type]
        except OverflowError:  # of an integer
            return float("inf")
    raise ValueError("a number of seconds, 0 or more" if or_zero else "a positive number of seconds")


def checked_timeout_s(value: object, *, or_zero: bool = False) -> float:
    """Return the argument `timeout_s` of a call as a float.

    Raises:
        UsageError: it is no limit of time; see `seconds`.
    """
    try:
        return seconds(value, or_zero=or_zero)
    except ValueError as error:
        raise UsageError(f"timeout_s must be {error}, not {value!r}") from None
