"""Differences between results and expected results, in words, and the error that reports them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.dtypes import DTYPES
from unisono.errors import UnisonoError
from unisono.testing.cases import Case


class CheckError(UnisonoError, AssertionError):
    """A collective or a transport has broken its contract.

    Attributes:
        program: a program that repeats the call; None if the error concerns only one rank.
        case: the call in the program.
    """

    program: str | None = None
    case: Case | None = None


def difference(result: NDArray[Any], expected: NDArray[Any], most_ulps: int = 0) -> str:
    """Return the difference between two arrays in words; empty if every element is within `most_ulps`.

    With `most_ulps=0` the bits are compared, so signs of zeros and NaNs count.
    """
    if (result.dtype, result.shape) != (expected.dtype, expected.shape):
        return f"the result is {result.dtype}{list(result.shape)}, not {expected.dtype}{list(expected.shape)}"
    if result.tobytes() == expected.tobytes():
        return ""
    parts = result.dtype.kind == "c"
    distance = (
        ulps(result.view(result.real.dtype), expected.view(expected.real.dtype)) if parts else ulps(result, expected)
    )
    wrong = np.flatnonzero(distance.reshape(result.size, -1).max(axis=1) > most_ulps)
    if not wrong.size:
        return ""
    where = [int(index) for index in np.unravel_index(wrong[0], result.shape)]
    one, other = result.flat[wrong[0]], expected.flat[wrong[0]]
    return f"element {where} of the result is {one}, not {other}; {wrong.size} of {result.size} elements differ"


def ulps(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.int64]:
    """Return the number of values of the dtype from each element of `a` to that of `b`, at least 1 if bits differ."""
    a, b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    bits_a, bits_b = (each.view(f"u{each.itemsize}").astype(np.int64) for each in (a, b))
    if DTYPES[a.dtype.name].kind in ("float", "float8"):
        top = np.int64(1) << (8 * a.itemsize - 1) if a.itemsize < 8 else np.int64(-(1 << 63))
        places = [np.where(bits & top, -(bits & ~top), bits & ~top) for bits in (bits_a, bits_b)]
    else:
        places = [bits_a, bits_b]
    with np.errstate(over="ignore"):
        distance: NDArray[np.int64] = np.abs(places[0] - places[1])
    least: NDArray[np.int64] = np.maximum(distance, bits_a != bits_b)
    return least
