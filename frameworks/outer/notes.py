"""`Note`: facts that ranks exchange beside an average, so that each rank sees whether all average the same parameters.

The ranks join the bits of their notes by "bor". Each bit stands there together with its complement, so a bit that two
ranks set differently is set in both.

>>> joined = Note(5, 9).bits() | Note(5, 9).bits()
>>> are_equal(joined), are_equal(joined | Note(4, 9).bits())
(True, False)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from unisono.frameworks.arrays import Array

_Value = TypeVar("_Value")


class Note(NamedTuple):
    """The facts about an average in which all ranks must agree.

    Attributes:
        number: the number of the average.
        checksum: the checksum of the outer parameters.
    """

    number: int
    checksum: int

    def bits(self) -> Array:
        """Return the note and its complements, as four elements of int64."""
        return np.array([self.number, ~self.number, self.checksum, ~self.checksum], np.int64)


def are_equal(joined: Array) -> bool:
    """Return whether all notes of which `joined` holds the bits, joined by "bor", are equal."""
    return not (joined[::2] & joined[1::2]).any()


def usual(values: Sequence[_Value]) -> _Value:
    """Return the most frequent value; of several, the first one."""
    return max(values, key=lambda value: (values.count(value), -values.index(value)))
