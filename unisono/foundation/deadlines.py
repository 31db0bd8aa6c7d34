"""Time limits: `Deadline` counts the remaining seconds, and `seconds` and `checked_timeout_s` validate arguments."""

from __future__ import annotations

import time
from numbers import Real

from unisono.errors import UsageError

# The longest single wait: sockets, selectors and locks raise OverflowError above 2^31 ms, which are 24.8 days.
LONGEST_WAIT_S = 2_000_000.0
# The shortest wait: a socket takes 0 as "do not block", and a call refuses it.
SHORTEST_WAIT_S = 0.001


class Deadline:
    """A moment by which something must have ended.

    Args:
        timeout_s: seconds from now; infinity for no limit.

    Attributes:
        when: the moment, in seconds of `time.monotonic`.

    >>> Deadline(float("inf")).remaining_s(), Deadline(0.0).remaining_s()
    (2000000.0, 0.001)
    """

    __slots__ = ("when",)

    def __init__(self, timeout_s: float) -> None:
        self.when = time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        """Return the seconds until the deadline, limited to the range `SHORTEST_WAIT_S` to `LONGEST_WAIT_S`."""
        return min(max(SHORTEST_WAIT_S, self.when - time.monotonic()), LONGEST_WAIT_S)

    def checked_remaining_s(self) -> float:
        """Return the result of `remaining_s`; raises TimeoutError if the deadline has passed."""
        if self.has_passed():
            raise TimeoutError("timed out")
        return self.remaining_s()

    def has_passed(self) -> bool:
        """Return whether the deadline has passed."""
        return time.monotonic() >= self.when


def seconds(value: object, *, or_zero: bool = False) -> float:
    """Return a time limit as a float. It may be infinite.

    Raises:
        ValueError: `value` is not a positive number, or with `or_zero`, is below 0. The message says what it must be.

    >>> seconds(30), seconds(float("inf"))
    (30.0, inf)
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if is_number and (value > 0 or (or_zero and value == 0)):  # type: ignore[operator]
        try:
            return float(value)  # type: ignore[arg-type]
        except OverflowError:  # an integer beyond the range of a float
            return float("inf")
    raise ValueError("a number of seconds, 0 or more" if or_zero else "a positive number of seconds")


def checked_timeout_s(value: object, *, or_zero: bool = False, name: str = "timeout_s") -> float:
    """Return the argument `timeout_s` of a call, or another time limit of this `name`, as a float.

    Raises:
        UsageError: `value` is not a time limit, by the rules of `seconds`.
    """
    try:
        return seconds(value, or_zero=or_zero)
    except ValueError as error:
        raise UsageError(f"{name} must be {error}, not {value!r}") from None
