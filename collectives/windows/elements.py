"""Which elements of a part an operation touches, and the arrays that it reads and writes: checked before it begins."""

from __future__ import annotations

import operator
from typing import Any, TypeAlias

import numpy as np

from unisono.collectives.arrays import operands
from unisono.collectives.windows.operations import Element, Selection
from unisono.errors import UsageError
from unisono.transports.contracts.call import AnyArray

Place: TypeAlias = "int | slice | Any"
"""A first element, a slice, or a sequence of positions."""


def selected(at: Place, count: int | None, total: int, rank: int) -> Selection:
    """Return the selection that the arguments of an operation mean.

    Args:
        at: the first element; or a slice, or an array of positions, which say how many elements there are.
        count: the number of elements of the array that is passed; None for all that `at` means: a single element, or
            those of the slice or array.
        total: the number of elements of the part.
        rank: the rank of the part, for errors.

    Raises:
        UsageError: `at` is no place, selects another number of elements, or goes beyond the part.
    """
    if type(at) is int and 0 <= at <= total - (count or 1):  # the usual case
        # as Selection(at, count), in a third of the time
        return tuple.__new__(Selection, (at, 1 if count is None else count, 1, None))
    if isinstance(at, slice):
        start, stop, step = _bounds(at, total, rank)
        selection = Selection(start, len(range(start, stop, step)), step)
    elif isinstance(at, (list, tuple, np.ndarray)) and not (isinstance(at, np.ndarray) and at.ndim == 0):
        indices = _positions(at, total, rank)
        selection = Selection(0, len(indices), 1, indices)
    else:
        try:
            start = operator.index(at)
        except TypeError:
            raise UsageError(
                f"at must be an integer, a slice or a sequence of integers, not {type(at).__name__}"
            ) from None
        selection = Selection(start, 1 if count is None else count)
        if start < 0 or start + selection.elements > total:
            raise beyond(start, selection.elements, total, rank)
    if count is not None and selection.elements != count:
        raise UsageError(f"the array has {count} elements, and at selects {selection.elements}: pass as many")
    return selection


def beyond(start: int, count: int, total: int, rank: int) -> UsageError:
    """Return the error of elements that are not in a part."""
    last = f" to {start + count - 1}" if count != 1 else ""
    return UsageError(f"element {start}{last} is not in the window of rank {rank}, which has {total} elements")


def _bounds(at: slice, total: int, rank: int) -> tuple[int, int, int]:
    """Return start, stop and step of a slice. Unlike a list, a part does not shorten a slice that goes beyond it."""
    try:
        for limit in (at.start, at.stop):
            if limit is not None and not -total <= operator.index(limit) <= total:
                raise UsageError(
                    f"{at} is not in the window of rank {rank}, which has {total} elements, and is not shortened"
                )
        return at.indices(total)
    except (TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{at} selects no elements: {error}") from None


def _positions(at: Any, total: int, rank: int) -> AnyArray:
    try:
        indices = np.asarray(at)
    except ValueError as error:
        raise UsageError(f"at is not an array of positions: {error}") from None
    if indices.ndim != 1 or (indices.dtype.kind not in "iu" and indices.size):
        raise UsageError(f"at must have one axis of integers, not {indices.dtype} of shape {indices.shape}")
    for extreme in (indices.min(), indices.max()) if indices.size else ():
        if not 0 <= int(extreme) < total:
            raise beyond(int(extreme), 1, total, rank)
    return np.ascontiguousarray(indices, np.int64)


def source_of(x: Any, element: Element, name: str = "x") -> AnyArray:
    """Return the flat elements of an array or a number that an operation reads, in C order.

    Raises:
        UsageError: it has another dtype than the window, or is no array.
    """
    if type(x) is np.ndarray and x.dtype == element.numpy:
        return x.reshape(-1) if x.flags.c_contiguous else np.ascontiguousarray(x).reshape(-1)
    if type(x) in element.numbers:
        return cell_of(x, element, name).reshape(1)
    operand = operands.source(x, name, any_order=False)
    if operand.flat.dtype != element.numpy:
        raise other_dtype(operand.flat.dtype, element, name)
    return operand.flat


def target_of(out: Any, element: Element) -> tuple[AnyArray, int]:
    """Return the flat memory of an array that an operation writes, and its number of elements.

    Raises:
        UsageError: it has another dtype than the window, or cannot be written in C order.
    """
    if type(out) is np.ndarray and out.dtype == element.numpy:
        flags = out.flags
        if flags.c_contiguous and flags.writeable:
            return out.reshape(-1), out.size
    operand = operands.target(out)
    if operand.flat.dtype != element.numpy:
        raise other_dtype(operand.flat.dtype, element, "out")
    if operand.order != "C":
        raise UsageError("out is in Fortran order: pass an array in C order")
    return operand.flat, operand.flat.size


def cell_of(value: Any, element: Element, name: str = "value") -> AnyArray:
    """Return a new array without axes that holds one value.

    Raises:
        UsageError: the value is not one number of the dtype of the window, or is beyond its range.
    """
    if type(value) in element.numbers:
        try:
            cell: AnyArray = np.array(value, element.numpy)
        except OverflowError:
            raise UsageError(f"{name} is {value}, which is beyond the range of {element.dtype.name}") from None
        return cell
    array = np.asarray(value)
    if array.size != 1:
        raise UsageError(f"{name} must be one element, not an array of {array.size}")
    if array.dtype != element.numpy:
        raise other_dtype(array.dtype, element, name)
    copied: AnyArray = array.reshape(()).copy()
    return copied


def other_dtype(dtype: np.dtype[Any], element: Element, name: str) -> UsageError:
    """Return the error of an array whose dtype differs from that of the window."""
    return UsageError(
        f"{name} has dtype {dtype}, and the window has {element.dtype.name}: convert {name}, or use "
        f"window.view({str(dtype)!r}), which sees the same memory as elements of that dtype"
    )
