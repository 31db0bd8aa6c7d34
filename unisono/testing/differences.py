"""How results differ from what they must be, in words, and the error that says so."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.dtypes import DTYPES
from unisono.errors import UnisonoError
from unisono.testing.cases import Case


class CheckError(UnisonoError, AssertionError):
    """A collective, or a transport, did not do what it must.

    Attributes:
        program: a program that makes the call again; None where the error is that of one rank alone.
        case: the call that it makes.
    """

    program: str | None = None
    case: Case | None = None


def difference(found: NDArray[Any], wanted: NDArray[Any], most_ulps: int = 0) -> str:
    """Return how `found` differs from `wanted`, or nothing if each element is within `most_ulps` of what it must be.

    With 0 the bits are compared, so that signs of zeros and NaNs count.
    """
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return f"the result is {found.dtype}{list(found.shape)}, not {wanted.dtype}{list(wanted.shape)}"
    if found.tobytes() == wanted.tobytes():
        return ""
    parts = found.dtype.kind == "c"
    distance = ulps(found.view(found.real.dtype), wanted.view(wanted.real.dtype)) if parts else ulps(found, wanted)
    wrong = np.flatnonzero(distance.reshape(found.size, -1).max(axis=1) > most_ulps)
    if not wrong.size:
        return ""
    where = [int(index) for index in np.unravel_index(wrong[0], found.shape)]
    one, other = found.flat[wrong[0]], wanted.flat[wrong[0]]
    return f"element {where} of the result is {one}, not {other}; {wrong.size} of {found.size} elements differ"


def ulps(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.int64]:
    """Return how many values of the dtype lie from each element of `a` to that of `b`, at least 1 if bits differ."""
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
