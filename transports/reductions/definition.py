"""Defines the arithmetic of reductions, in numpy: lift, combine, lower. The native kernels are tested against it.

A combination is computed in the accumulation dtype of its elements (`DType.accumulate`: float32 for the 16-bit and
8-bit floats). It is rounded once, when it is stored, for any number of operands, and the division of an average is part
of it. Integers wrap. Minimum and maximum propagate NaN. A float overflows to infinity, and float8_e4m3fn, which has no
infinity, to NaN. There are no warnings.

Complex products are computed part by part, because those of numpy depend on the processor. All arithmetic uses the
default floating-point environment, because that of the calling thread may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Complex, Integral, Real
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from unisono.dtypes import DTYPES, DType
from unisono.errors import UsageError
from unisono.operations import Combine, Lower, Op
from unisono.transports import _core

if TYPE_CHECKING:
    from numpy.typing import NDArray

_State: TypeAlias = "NDArray[Any]"


_OF_ML_DTYPES = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"})
# The type that the factor of contributions must have, by kind of dtype.
_NUMBERS: dict[str, type] = {"integer": Integral, "float": Real, "float8": Real, "complex": Complex}


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the numpy dtype of `dtype`; the module `ml_dtypes` provides those that numpy lacks."""
    if dtype.name not in _OF_ML_DTYPES:
        return np.dtype(dtype.name)
    import ml_dtypes  # takes 5 ms to load, and most programs do not need it

    element: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.name))
    return element


def known_dtype(element: np.dtype[Any]) -> DType | None:
    """Return the dtype of a numpy dtype in native byte order; None if Unisono has no such dtype."""
    dtype = DTYPES.get(element.name)
    return dtype if dtype is not None and element == numpy_dtype(dtype) else None


def lift(op: Op, contribution: _State, out: _State | None = None) -> _State:
    """Return the array that a rank contributes to a plan of `op`: the contribution, times the factor if `op` has one.

    Args:
        op: the operation; the caller has checked that it is defined for the dtype.
        contribution: flat array, which is not changed. Without a factor it is the result.
        out: flat array of the same shape and dtype for the product; None for a new array.

    Raises:
        UsageError: the factor is out of the range of the dtype.
    """
    if op.factor is None:
        return contribution
    factor = factor_of(op, DTYPES[contribution.dtype.name])
    lifted = np.empty_like(contribution) if out is None else out
    with _core.DefaultFloatEnvironment(), np.errstate(all="ignore"):
        lifted[...] = _multiply(contribution.astype(factor.dtype, copy=False), factor)
    return lifted


def factor_of(op: Op, dtype: DType) -> Any:
    """Return the factor of `op` in the accumulation dtype; raises `UsageError` if it is out of range."""
    factor: Any = op.factor
    accumulate = np.dtype(dtype.accumulate)
    fits = isinstance(factor, _NUMBERS[dtype.kind])
    if fits and dtype.kind == "integer":
        limits = np.iinfo(accumulate)
        fits = bool(limits.min <= factor <= limits.max)
    if not fits:
        raise UsageError(f"the factor of {op.name} is {factor!r}, which is not in the range of {dtype.name}")
    with _core.DefaultFloatEnvironment(), np.errstate(over="ignore"):
        return accumulate.type(factor)


def reduce_into(dst: _State, sources: Sequence[_State], op: Op, size: int, lower: bool) -> None:
    """Set `dst` to sources[0] ∘ sources[1] ∘ …, lowered if `lower`, and rounded once.

    Args:
        dst: flat array that is overwritten. It may be one of the sources.
        sources: one or more flat arrays of the shape and dtype of `dst`.
        op: the operation; the caller has checked that it is defined for the dtype.
        size: the number of contributions to the whole reduction, by which an average divides.
        lower: whether the result is final. Otherwise it is a state for further combinations.
    """
    accumulate = _accumulate(dst)
    combine = _COMBINE[op.combine]
    with _core.DefaultFloatEnvironment(), np.errstate(all="ignore"):
        state = sources[0].astype(accumulate)
        for source in sources[1:]:
            state = combine(state, source.astype(accumulate, copy=False)).astype(accumulate, copy=False)
        dst[...] = _LOWER[op.lower](state, size) if lower else state


def _accumulate(array: _State) -> np.dtype[Any]:
    return np.dtype(DTYPES[array.dtype.name].accumulate)


# --- combine -------------------------------------------------------------------------------------------------------


def _multiply(a: _State, b: _State) -> _State:
    product: _State
    if a.dtype.kind != "c":
        product = a * b
    else:
        product = np.empty_like(a)
        product.real = a.real * b.real - a.imag * b.imag
        product.imag = a.real * b.imag + a.imag * b.real
    return product


def _located(is_better: np.ufunc) -> Callable[[_State, _State], _State]:
    """Return the combination of pairs (value, index): the better value wins, then the lower index. NaN is best."""

    def combine(a: _State, b: _State) -> _State:
        a_nan, b_nan = np.isnan(a.real), np.isnan(b.real)
        is_tied = (a.real == b.real) | (a_nan & b_nan)
        wins = is_better(a.real, b.real) | (a_nan & ~b_nan) | (is_tied & (a.imag <= b.imag))
        located: _State = np.where(wins, a, b)
        return located

    return combine


_COMBINE: dict[Combine, Callable[[_State, _State], _State]] = {
    Combine.SUM: np.add,
    Combine.PROD: _multiply,
    Combine.MIN: np.minimum,
    Combine.MAX: np.maximum,
    Combine.BAND: np.bitwise_and,
    Combine.BOR: np.bitwise_or,
    Combine.BXOR: np.bitwise_xor,
    Combine.LAND: np.logical_and,
    Combine.LOR: np.logical_or,
    Combine.LXOR: np.logical_xor,
    Combine.MINLOC: _located(np.less),
    Combine.MAXLOC: _located(np.greater),
}


# --- lower ---------------------------------------------------------------------------------------------------------


def _identity(state: _State, size: int) -> _State:
    return state


def _divide(state: _State, size: int) -> _State:
    """Divide by `size`. Integers truncate towards zero, and use 64 bits because `size` may not fit into the dtype."""
    quotient: _State
    if state.dtype.kind in "iu":
        wide = state.astype(np.int64 if state.dtype.kind == "i" else np.uint64)
        divisor = wide.dtype.type(size)
        quotient = (wide - np.fmod(wide, divisor)) // divisor
    else:
        parts = state.view(state.real.dtype)
        quotient = (parts / parts.dtype.type(size)).view(state.dtype)
    return quotient


def _truth(state: _State, size: int) -> _State:
    return np.not_equal(state, 0)


_LOWER: dict[Lower, Callable[[_State, int], _State]] = {
    Lower.IDENTITY: _identity,
    Lower.DIVIDE_BY_SIZE: _divide,
    Lower.TRUTH: _truth,
}
