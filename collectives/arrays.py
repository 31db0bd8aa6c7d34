"""What callers pass as arrays: checked, and turned into flat contiguous memory for executors.

Everything wrong is found here, on the rank that erred, before a byte is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the names bfloat16 and float8)
import numpy as np

from unisono.dtypes import DTYPES, DType
from unisono.errors import UsageError
from unisono.transports.base import AnyArray

# numpy's dtype objects, in this machine's byte order, to Unisono's; looking up their names would take microseconds.
_DTYPES: dict[np.dtype[Any], DType] = {np.dtype(name): dtype for name, dtype in DTYPES.items()}


@dataclass(slots=True)
class Operand:
    """An array as executors see it.

    Attributes:
        flat: its elements in memory order, one-dimensional and contiguous; a view where that is possible.
        dtype: their type.
        shape: the array's shape.
        order: "C", or "F" where the memory is in Fortran order only.
    """

    flat: AnyArray
    dtype: DType
    shape: tuple[int, ...]
    order: str


def source(x: Any) -> Operand:
    """Return the operand for an array that is read. A strided array is packed, in C order.

    Raises:
        UsageError: it is not a numpy array, or its elements are of a type that Unisono does not move.
    """
    array = _checked(x, "x")
    flags = array.flags
    if flags.c_contiguous:
        return Operand(array.reshape(-1), dtype_of(array, "x"), array.shape, "C")
    if flags.f_contiguous:
        return Operand(array.T.reshape(-1), dtype_of(array, "x"), array.shape, "F")
    return Operand(np.ascontiguousarray(array).reshape(-1), dtype_of(array, "x"), array.shape, "C")


def target(out: Any, like: Operand | None = None) -> Operand:
    """Return the operand for an array that is written, which must fit `like` if that is given.

    Raises:
        UsageError: it is not a writable, contiguous numpy array of the dtype, shape and memory order of `like`.
    """
    array = _checked(out, "out")
    dtype = dtype_of(array, "out")
    flags = array.flags
    if not flags.writeable:
        raise UsageError("out is read-only: pass an array that can be written")
    if not (flags.c_contiguous or flags.f_contiguous):
        raise UsageError("out is not contiguous, so the result cannot be written in place: pass a contiguous array")
    order = "C" if flags.c_contiguous else "F"
    if like is not None:
        _check_fit(array, dtype, order, like)
    flat = array.reshape(-1) if order == "C" else array.T.reshape(-1)
    return Operand(flat, dtype, array.shape, order)


def empty_like(operand: Operand) -> tuple[AnyArray, Operand]:
    """Return a new array for the result of `operand`, and the operand to write it by."""
    dtype = operand.flat.dtype
    array: AnyArray = np.empty(operand.shape, dtype, order="F" if operand.order == "F" else "C")
    flat = array.reshape(-1) if operand.order == "C" else array.T.reshape(-1)
    return array, Operand(flat, operand.dtype, operand.shape, operand.order)


def dtype_of(array: AnyArray, name: str) -> DType:
    """Return the dtype of `array`, which the error calls `name`.

    Raises:
        UsageError: it is not one that Unisono moves; the message says what to do.
    """
    found = _DTYPES.get(array.dtype)
    if found is not None:
        return found
    raise UsageError(f"{name} has dtype {array.dtype}, which cannot be sent: {_advice(array.dtype)}")


def _checked(x: Any, name: str) -> AnyArray:
    if type(x) is np.ndarray:
        return x
    if not isinstance(x, np.ndarray):
        what = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
        raise UsageError(f"{name} must be a numpy array, not {what}: pass numpy.asarray({name})")
    if isinstance(x, np.ma.MaskedArray):
        raise UsageError(f"{name} is a masked array, and masks are not reduced: pass {name}.filled(value)")
    return x


def _advice(dtype: np.dtype[Any]) -> str:
    if dtype.hasobject:
        return "its elements are Python objects; convert it with astype to a numeric dtype"
    if dtype.names is not None:
        return "reduce each field of a structured array by itself"
    if DTYPES.get(dtype.name) is not None:
        return f"its byte order is not this machine's; convert it with astype({dtype.name!r})"
    return f"convert it with astype to one of {', '.join(DTYPES)}"


def _check_fit(out: AnyArray, dtype: DType, order: str, x: Operand) -> None:
    if dtype is not x.dtype:
        raise UsageError(f"out has dtype {dtype.name} and x has {x.dtype.name}: they must be the same")
    if out.shape != x.shape:
        raise UsageError(f"out has shape {out.shape} and x has {x.shape}: they must be the same")
    if order != x.order and out.size > 1:
        raise UsageError(f"out is in {order} order and x in {x.order} order: they must be the same")


def check_overlap(x: Operand, out: Operand) -> None:
    """Raise `UsageError` if the arrays share some of their memory, but are not the same."""
    if np.may_share_memory(x.flat, out.flat) and x.flat.ctypes.data != out.flat.ctypes.data:
        raise UsageError("x and out overlap without being the same array: pass out=x, or separate arrays")
