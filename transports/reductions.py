"""The arithmetic of reductions in numpy: lift, combine, lower. Native kernels are tested against it.

A combination is computed in the accumulation dtype of its element type (`DType.accumulate`: float32 for the 16-bit and
8-bit floats) and rounded once when it is stored, however many operands it has; the division of an average is part of
it. Integers wrap, NaN is propagated by min and max, and overflow of a float is infinity, all without warnings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 and the 8-bit floats with numpy, so that they are found by name)
import numpy as np
from numpy.typing import NDArray

from unisono.dtypes import DTYPES, DType
from unisono.operations import Combine, Lower, Op

_COMBINE: dict[Combine, np.ufunc] = {
    Combine.SUM: np.add,
    Combine.PROD: np.multiply,
    Combine.MIN: np.minimum,
    Combine.MAX: np.maximum,
}


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return numpy's form of `dtype`."""
    return np.dtype(dtype.name)


def reduce_into(dst: NDArray[Any], sources: Sequence[NDArray[Any]], op: Op, size: int, lower: bool) -> None:
    """Set `dst` to sources[0] ∘ sources[1] ∘ …, lowered if `lower`, rounded once.

    Args:
        dst: flat array that is overwritten; it may be the same memory as any of the sources.
        sources: one or more flat arrays of the shape and dtype of `dst`.
        op: the operation; the caller has checked that it is defined for the dtype.
        size: number of contributions to the whole reduction, by which an average divides.
        lower: whether the result is final, so that the state is turned into an element of the result.
    """
    accumulate = np.dtype(DTYPES[dst.dtype.name].accumulate)
    combine = _COMBINE[op.combine]
    with np.errstate(all="ignore"):
        state = sources[0].astype(accumulate)
        for source in sources[1:]:
            combine(state, source.astype(accumulate, copy=False), out=state)
        dst[...] = _LOWER[op.lower](state, size) if lower else state


def _identity(state: NDArray[Any], size: int) -> NDArray[Any]:
    return state


def _divide(state: NDArray[Any], size: int) -> NDArray[Any]:
    """Divide by `size`; integers truncate towards zero, in 64 bits because `size` may not fit into the dtype."""
    quotient: NDArray[Any]
    if state.dtype.kind in "iu":
        wide = state.astype(np.int64 if state.dtype.kind == "i" else np.uint64)
        divisor = wide.dtype.type(size)
        quotient = (wide - np.fmod(wide, divisor)) // divisor
    else:
        quotient = state / state.dtype.type(size)
    return quotient


_LOWER: dict[Lower, Callable[[NDArray[Any], int], NDArray[Any]]] = {
    Lower.IDENTITY: _identity,
    Lower.DIVIDE_BY_SIZE: _divide,
}
