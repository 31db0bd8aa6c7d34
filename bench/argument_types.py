"""Types of command-line arguments for `argparse`.

Each function converts the text that a user has passed. If it cannot be used, the error says which values can.
"""

from __future__ import annotations

from argparse import ArgumentTypeError

from unisono.foundation.deadlines import seconds
from unisono.options import parse_transports


def count(text: str) -> int:
    """Return the number in `text`, at least 1.

    >>> count("3")
    3
    """
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= 1):
        raise ArgumentTypeError(f"it must be an integer of at least 1, not {text!r}")
    return int(text)


def counts(text: str) -> list[int]:
    """Return the numbers in `text`, separated by commas, each at least 1.

    >>> counts("2,16")
    [2, 16]
    """
    return [count(part.strip()) for part in text.split(",")]


def duration(text: str) -> float:
    """Return the positive number of seconds in `text`.

    >>> duration("0.5")
    0.5
    """
    try:
        return seconds(float(text))
    except ValueError:
        raise ArgumentTypeError(f"it must be a positive number of seconds, not {text!r}") from None


def transports(text: str) -> str:
    """Return the transports in `text`, as the option `transports` takes them.

    >>> transports("SHM,tcp")
    'shm,tcp'
    """
    try:
        return parse_transports(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} cannot be used: it must be {error}") from None
