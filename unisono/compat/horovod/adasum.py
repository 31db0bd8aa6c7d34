"""The reduction "Adasum" of Maleki et al. 2020 (arXiv:2006.02924): a sum that adapts to how parallel gradients are.

For two gradients a and b it is (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b: their sum if they are orthogonal, and their
mean if they are equal. More ranks combine in pairs, then pairs of pairs, so their number must be a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unisono import Communicator, UsageError
from unisono.frameworks.arrays import Array, flatten, same_bits


def check_size(size: int) -> None:
    """Check that a number of ranks can make an Adasum; raises `UsageError`."""
    if size & (size - 1):
        raise UsageError(f"op=Adasum needs 2, 4, 8, … ranks, and there are {size}: use op=Average")


def reduce(comm: Communicator, arrays: Sequence[Any]) -> list[Any]:
    """Overwrite each array with the Adasum over all ranks, and return the arrays. All ranks call it.

    Dot products and norms are those of an array, not of a list. Floats narrower than float32 are combined in float32.
    All ranks get the same bits, because the lower rank of each pair is always the first.
    """
    flats = [flatten(x, f"array {index}") for index, x in enumerate(arrays)]
    own = [np.array(each.flat, np.promote_types(_plain(each.flat.dtype), np.float32)) for each in flats]
    distance = 1
    while distance < comm.size:
        partner = comm.rank ^ distance
        theirs = [np.empty_like(x) for x in own]
        for x, received in zip(own, theirs, strict=True):
            if x.size:
                comm.sendrecv(x, partner, received, partner)
        pairs = zip(own, theirs, strict=True) if comm.rank < partner else zip(theirs, own, strict=True)
        own = [combined(low, high) for low, high in pairs]
        distance *= 2
    for each, x in zip(flats, own, strict=True):
        each.flat[...] = x
        each.put_back()
    return list(arrays)


@same_bits
def combined(low: Array, high: Array) -> Array:
    """Return the Adasum of two flat arrays. Dot products are computed in float64, so that squares do not underflow."""
    wide_low, wide_high = low.astype(np.float64), high.astype(np.float64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        dot = float(np.dot(wide_low, wide_high))
        squares = float(np.dot(wide_low, wide_low)), float(np.dot(wide_high, wide_high))
        factors = [1 - dot / (2 * square) if square else 1.0 for square in squares]
        total: Array = (factors[0] * wide_low + factors[1] * wide_high).astype(low.dtype)
    return total


def _plain(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a float of numpy that has at least the range of `dtype`, which may be one of `ml_dtypes`."""
    return dtype if dtype.kind == "f" and dtype.itemsize >= 4 else np.dtype(np.float32)
