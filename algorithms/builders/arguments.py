"""Checks of arguments, which all builders share."""

from __future__ import annotations

from math import isqrt

from unisono.errors import UsageError

# The most parts into which a builder cuts a vector. More would be a few elements each, and take minutes to plan.
MOST_PARTS = 4096


def check_ranks(size: int, rank: int, root: int = 0) -> None:
    """Check the number of ranks, the rank of the plan, and the root.

    Raises:
        UsageError: `size` is less than 1, or `rank` or `root` is not one of 0 … size - 1.
    """
    if size < 1:
        raise UsageError(f"the number of ranks is {size}, but must be at least 1")
    for name, value in (("rank", rank), ("root", root)):
        if not 0 <= value < size:
            raise UsageError(f"{name} {value} is out of range: there are {size} ranks")


def check_at_least(name: str, value: int, least: int) -> None:
    """Check a parameter against its least value, such as a radix of at least 2.

    Raises:
        UsageError: `value` is less than `least`.
    """
    if value < least:
        raise UsageError(f"{name} is {value}, but must be at least {least}")


def check_parts(name: str, value: int) -> None:
    """Check a number of parts of a vector for which a plan has steps of their own, such as lanes or blocks.

    Raises:
        UsageError: `value` is less than 1, or more than `MOST_PARTS`.
    """
    check_at_least(name, value, 1)
    if value > MOST_PARTS:
        raise UsageError(f"{name} is {value}, but must be at most {MOST_PARTS}")


def needs_even(size: int) -> str | None:
    """Return None if the number of ranks is even, else the reason why an algorithm that pairs ranks refuses it."""
    return None if size % 2 == 0 else f"it needs an even number of ranks, not {size}"


def needs_power_of_two(size: int) -> str | None:
    """Return None if the number of ranks is a power of two, else the reason why an algorithm refuses it."""
    return None if size & (size - 1) == 0 else f"it needs a number of ranks that is a power of two, not {size}"


def square_dims(size: int) -> tuple[int, int]:
    """Return the lengths of the grid of two dimensions that is as square as possible, the shorter length first."""
    short = next(length for length in range(isqrt(size), 0, -1) if size % length == 0)
    return short, size // short


def check_supported(refusal: str | None) -> None:
    """Raise a refusal, such as the result of `needs_even(size)`.

    Raises:
        UsageError: `refusal` is not None.
    """
    if refusal:
        raise UsageError(refusal)
