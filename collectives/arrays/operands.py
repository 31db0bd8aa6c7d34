"""What callers pass as arrays: checked, and turned into flat contiguous memory for executors.

Everything wrong is found here, on the rank that erred, before a byte is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from unisono.collectives.arrays import adapters
from unisono.dtypes import DTYPES, DType
from unisono.errors import UsageError
from unisono.transports.contracts.call import AnyArray
from unisono.transports.reductions.definition import known_dtype

# What several arrays of one call may be given as.
LISTS = frozenset({list, tuple})

# numpy's dtype objects that have been seen, to Unisono's; looking up their names would take microseconds.
_DTYPES: dict[np.dtype[Any], DType] = {}


class Operand:
    """An array as executors see it.

    Attributes:
        flat: its elements in memory order, one-dimensional and contiguous; a view where that is possible.
        dtype: their type.
        shape: the array's shape.
        order: "C", or "F" where the memory is in Fortran order only.
        is_packed: whether `flat` is a copy, because the array is not contiguous in an order that will do.
    """

    __slots__ = ("dtype", "flat", "is_packed", "order", "shape")

    def __init__(
        self, flat: AnyArray, dtype: DType, shape: tuple[int, ...], order: str, is_packed: bool = False
    ) -> None:
        self.flat = flat
        self.dtype = dtype
        self.shape = shape
        self.order = order
        self.is_packed = is_packed


def source(x: Any, name: str = "x", *, any_order: bool = True) -> Operand:
    """Return the operand for an array that is read. A strided array is packed, in C order.

    Args:
        x: the array.
        name: what errors call it.
        any_order: whether the elements may be taken in Fortran order, if they lie so.

    Raises:
        UsageError: it is no array, or one that cannot be read where it is, or its elements are of a type that Unisono
            does not move.
        TransportUnavailableError: it is in the memory of a device.
    """
    array = adapters.view(x, name)
    operand = to_read(array, name, any_order=any_order)
    if operand is not None:
        return operand
    return Operand(np.ascontiguousarray(array).reshape(-1), dtype_of(array, name), array.shape, "C", is_packed=True)


def to_read(array: AnyArray, name: str, *, any_order: bool = True) -> Operand | None:
    """Return the operand for an array that is read where it lies; None if it must be packed.

    Raises:
        UsageError: its elements are of a type that Unisono does not move.
    """
    flags = array.flags
    if flags.c_contiguous:
        return Operand(array.reshape(-1), dtype_of(array, name), array.shape, "C")
    if flags.f_contiguous and any_order:
        return Operand(array.T.reshape(-1), dtype_of(array, name), array.shape, "F")
    return None


def target(out: Any, name: str = "out") -> Operand:
    """Return the operand for an array that is written, which errors call `name`.

    Raises:
        UsageError: it is not a writable, contiguous array of a type that Unisono moves.
        TransportUnavailableError: it is in the memory of a device.
    """
    return to_write(adapters.view_to_write(out, name), name)


def to_write(array: AnyArray, name: str) -> Operand:
    """Return the operand for an array of numpy's that is written; raises `UsageError` as `target` does."""
    dtype = dtype_of(array, name)
    flags = array.flags
    if not flags.writeable:
        raise UsageError(f"{name} is read-only: pass an array that can be written")
    if not (flags.c_contiguous or flags.f_contiguous):
        raise UsageError(f"{name} is not contiguous, so the result cannot be written in place: pass a contiguous array")
    order = "C" if flags.c_contiguous else "F"
    flat = array.reshape(-1) if order == "C" else array.T.reshape(-1)
    return Operand(flat, dtype, array.shape, order)


def new(shape: tuple[int, ...], like: Operand, *, zeros: bool = False) -> tuple[AnyArray, Operand]:
    """Return a new array of numpy of this shape, with the dtype and order of `like`, and the operand to write it by."""
    make = np.zeros if zeros else np.empty
    array: AnyArray = make(shape, like.flat.dtype, order="F" if like.order == "F" else "C")
    flat = array.reshape(-1) if like.order == "C" else array.T.reshape(-1)
    return array, Operand(flat, like.dtype, shape, like.order)


class Memory(Protocol):
    """How the arrays of a call are seen as operands, and those of its results are made: on the host, or on a device."""

    def source(self, x: Any, name: str = "x", *, any_order: bool = True) -> Operand:
        """See `source`."""

    def target(self, out: Any, name: str = "out") -> Operand:
        """See `target`."""

    def new(self, shape: tuple[int, ...], like: Operand, *, zeros: bool = False) -> tuple[Any, Operand]:
        """See `new`."""

    def wrapped(self, array: Any, x: Any) -> tuple[Any, Callable[[AnyArray], Any] | None]:
        """See `adapters.wrapped`."""


class _Host:
    """The memory of the host."""

    source = staticmethod(source)
    target = staticmethod(target)
    new = staticmethod(new)
    wrapped = staticmethod(adapters.wrapped)


HOST: Memory = _Host()


def list_of(x: Any, out: Any) -> type[Any] | None:
    """Return as what several arrays were given, list or tuple; None of one array. `out` tells where there is no `x`."""
    gathered = type(out if x is None else x)
    return gathered if gathered in LISTS else None


def outs_of(x: Sequence[Any], out: Any) -> Sequence[Any]:
    """Return where the result of each of the arrays `x` goes: what `out` has for it, or None if `out` is None.

    Raises:
        UsageError: `out` is no list of as many arrays.
    """
    if out is None:
        return [None] * len(x)
    if type(out) not in LISTS or len(out) != len(x):
        raise UsageError(f"x is {len(x)} arrays, and out is not: pass a list with an array for each of them")
    return out  # type: ignore[no-any-return]


def target_like(x: Any) -> Any:
    """Return a new array for a result like the numpy array `x`, or None where it takes a closer look.

    For a list or a tuple of arrays, return another one.
    """
    if type(x) is np.ndarray:
        return np.empty_like(x)
    return type(x)(map(target_like, x)) if type(x) in LISTS else None


def zeros_like(x: Any) -> Any:
    """Return a new array of zeros for a result like the numpy array `x`, or None where it takes a closer look.

    For a list or a tuple of arrays, return another one.
    """
    if type(x) is np.ndarray:
        return np.zeros_like(x)
    return type(x)(map(zeros_like, x)) if type(x) in LISTS else None


def target_of_all(x: Any, size: int) -> Any:
    """Return a new array for what `size` ranks have, each an array like `x`, or None where it takes a closer look.

    For a list or a tuple of arrays, return another one.
    """
    if type(x) in LISTS:
        return type(x)(target_of_all(each, size) for each in x)
    if type(x) is not np.ndarray or x.ndim == 0:
        return None
    rows, *rest = x.shape
    return np.empty((size * rows, *rest), x.dtype)


def target_of_share(x: Any, size: int) -> Any:
    """Return a new array for an equal share of `x`, one of `size`, or None where it takes a closer look.

    For a list or a tuple of arrays, return another one.
    """
    if type(x) in LISTS:
        return type(x)(target_of_share(each, size) for each in x)
    if type(x) is not np.ndarray or x.ndim == 0:
        return None
    rows, *rest = x.shape
    return np.empty((rows // size, *rest), x.dtype)


def dtype_of(array: AnyArray, name: str) -> DType:
    """Return the dtype of `array`, which the error calls `name`; raises as `check_dtype` does."""
    return _DTYPES.get(array.dtype) or check_dtype(array.dtype, name)


def check_dtype(dtype: np.dtype[Any], name: str) -> DType:
    """Return Unisono's name for a dtype of numpy's; the error says that `name` has it.

    Raises:
        UsageError: elements of that type cannot be sent; the message says what to do.
    """
    found = _DTYPES.get(dtype) or known_dtype(dtype)
    if found is not None:
        _DTYPES[dtype] = found
        return found
    raise UsageError(f"{name} has dtype {dtype}, which cannot be sent: {_advice(dtype, name)}")


def _advice(dtype: np.dtype[Any], name: str) -> str:
    if dtype.hasobject:
        return "its elements are Python objects; convert it with astype to a numeric dtype"
    if dtype.names is not None:
        return f"pass each field separately; a call that combines nothing also takes the bytes, {name}.view('uint8')"
    if DTYPES.get(dtype.name) is not None:
        return f"its byte order is not this machine's; convert it with astype({dtype.name!r})"
    return f"convert it with astype to one of {', '.join(DTYPES)}"


def check_fit(out: Operand, x: Operand, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Check that `out` has the dtype and memory order of `x`, and one of these shapes.

    Raises:
        UsageError: it has not.
    """
    if out.dtype is not x.dtype:
        raise UsageError(f"out has dtype {out.dtype.name} and x has {x.dtype.name}: they must be the same")
    if out.shape not in shapes:
        wanted = " or ".join(str(shape) for shape in shapes)
        raise UsageError(f"out has shape {out.shape}, and the result of x, which has {x.shape}, has {wanted}")
    if out.order != x.order and out.flat.size > 1:
        raise UsageError(f"out is in {out.order} order and x in {x.order} order: they must be the same")


def copy(x: Operand, out: Operand) -> None:
    """Copy the elements of `x` to `out`, in memory order, as a message would.

    Raises:
        UsageError: the dtypes or the numbers of elements are not equal.
    """
    if (x.dtype, x.flat.size) != (out.dtype, out.flat.size):
        both = f"{x.dtype.name}[{x.flat.size}] and out is {out.dtype.name}[{out.flat.size}]"
        raise UsageError(f"x is {both}: a message has the same dtype and number of elements at both ends")
    out.flat[...] = x.flat


def check_apart(pairs: Sequence[tuple[AnyArray | None, AnyArray | None]]) -> None:
    """Check that of several arrays, each with where its result goes, nothing is written that is another one as well.

    Raises:
        UsageError: it is.
    """
    lying = []
    for source, target in pairs:
        places = [_place(array) for array in (source, target) if array is not None]
        if source is not None and target is not None and np.may_share_memory(source, target):
            lying.append((min(begin for begin, _ in places), max(end for _, end in places), True))
        else:
            written = [array is target for array in (source, target) if array is not None]
            lying += [(*place, is_written) for place, is_written in zip(places, written, strict=True)]
    lying = [(begin, end, is_written) for begin, end, is_written in lying if begin < end]
    end = written_end = 0
    for begin, array_end, is_written in sorted(lying):
        if begin < (end if is_written else written_end):
            raise UsageError("an out is in the memory of another array of the same list or group: pass separate arrays")
        end = max(end, array_end)
        written_end = max(written_end, array_end) if is_written else written_end


def _place(array: AnyArray) -> tuple[int, int]:
    begin = array.ctypes.data
    return begin, begin + array.nbytes


def share_memory(x: Operand, out: Operand, offset: int | None) -> bool:
    """Return whether the arrays lie in the same memory, `out` beginning `offset` elements after the beginning of `x`.

    Raises:
        UsageError: they have some memory in common, but do not lie like that; or any, if `offset` is None.
    """
    if not np.may_share_memory(x.flat, out.flat):
        return False
    if offset is None:
        raise UsageError("x and out share memory: pass separate arrays")
    if out.flat.ctypes.data - x.flat.ctypes.data != offset * x.dtype.itemsize:
        raise UsageError(
            "x and out overlap, but not as in place: pass the same array where both have the same shape, this rank's "
            "part of the larger one where they have not, or separate arrays"
        )
    return True
