"""How a call makes new arrays for its results before it is known whether the call cache has the call.

Used by: `operands`. `torch` adds a row when the program passes its first tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np

from unisono.errors import UsageError
from unisono.transports.contracts.call import AnyArray


def made(make: Callable[..., AnyArray], shape: tuple[int, ...], dtype: np.dtype[Any], order: str = "C") -> AnyArray:
    """Return the array of a result, which a function of numpy makes.

    Raises:
        UsageError: this rank has no memory for it, or no array has so many elements.
    """
    try:
        return make(shape, dtype, order=order)
    except (MemoryError, ValueError, OverflowError):
        nbytes = prod(shape) * dtype.itemsize
        raise UsageError(
            f"the result is {dtype}{list(shape)}, and this rank has no memory for {nbytes} bytes: check the counts and "
            "shapes, or call for smaller parts"
        ) from None


class ArrayMaker(NamedTuple):
    """How a call makes arrays for results, for one class of arrays. Each function returns None if it can make none.

    Attributes:
        like: ``like(x)`` returns a new array with the shape, dtype and memory order of `x`.
        zeros_like: ``zeros_like(x)`` returns such an array of zeros.
        of_shape: ``of_shape(x, shape)`` returns a new array of this shape in C order, with the dtype of `x`.
    """

    like: Callable[[Any], Any]
    zeros_like: Callable[[Any], Any]
    of_shape: Callable[[Any, tuple[int, ...]], Any]


# By class, for the arrays that the call cache reads. Modules of other libraries add theirs.
MAKERS: dict[type, ArrayMaker] = {
    np.ndarray: ArrayMaker(np.empty_like, np.zeros_like, lambda x, shape: made(np.empty, shape, x.dtype))
}
