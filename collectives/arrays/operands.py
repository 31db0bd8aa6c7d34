"""Operands: the caller's arrays, checked and turned into flat contiguous memory for executors.

An array that cannot be used raises its error here, on the rank that passed it, before a byte is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from unisono.collectives.arrays import adapters
from unisono.collectives.arrays.makers import MAKERS, made
from unisono.dtypes import DTYPES, DType
from unisono.errors import UsageError
from unisono.transports.contracts.call import AnyArray, moved
from unisono.transports.reductions.definition import known_dtype

# The types in which a caller may pass several arrays to one call.
LISTS = frozenset({list, tuple})

# From numpy's dtypes to Unisono's, filled on first use. A lookup by `dtype.name` would take microseconds.
_DTYPES: dict[np.dtype[Any], DType] = {}


class Operand:
    """An array in the form that executors take.

    Attributes:
        flat: the elements in memory order, as a contiguous one-dimensional array; a view unless `is_packed`.
        dtype: the dtype of the elements.
        shape: the shape of the caller's array.
        order: "C", or "F" for an array that is contiguous in Fortran order only.
        is_packed: whether `flat` is a copy, which a strided array needs.
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

    @property
    def moved(self) -> AnyArray:
        """The memory of `flat` as a plan reads or writes it: as bytes if the dtype is moved as bytes."""
        return moved(self.flat, self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"


def source(x: Any, name: str = "x", *, any_order: bool = True) -> Operand:
    """Return the operand for an array that a call reads. A strided array is packed, in C order.

    Args:
        x: the array.
        name: the name of the array in errors.
        any_order: whether an array in Fortran order may be used as it is. Otherwise it is packed.

    Raises:
        UsageError: `x` is not an array, its memory cannot be read, or Unisono does not move its dtype.
        TransportUnavailableError: `x` is in the memory of a device.
    """
    array = adapters.view(x, name)
    operand = to_read(array, name, any_order=any_order)
    if operand is not None:
        return operand
    return Operand(np.ascontiguousarray(array).reshape(-1), dtype_of(array, name), array.shape, "C", is_packed=True)


def to_read(array: AnyArray, name: str, *, any_order: bool = True) -> Operand | None:
    """Return the operand for an array that a call reads without a copy; None if the array must be packed first.

    Raises:
        UsageError: Unisono does not move the dtype of the array.
    """
    flags = array.flags
    if flags.c_contiguous:
        return Operand(array.reshape(-1), dtype_of(array, name), array.shape, "C")
    if flags.f_contiguous and any_order:
        return Operand(array.T.reshape(-1), dtype_of(array, name), array.shape, "F")
    return None


def target(out: Any, name: str = "out") -> Operand:
    """Return the operand for the array `out`, to which a call writes its result. Errors call the array `name`.

    Raises:
        UsageError: `out` is not a writable, contiguous array, or Unisono does not move its dtype.
        TransportUnavailableError: `out` is in the memory of a device.
    """
    return to_write(adapters.view_to_write(out, name), name)


def to_write(array: AnyArray, name: str) -> Operand:
    """Return the operand for a numpy array to which a call writes. It raises the `UsageError`s of `target`."""
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
    """Return a new numpy array of this shape, with the dtype and order of `like`, and the operand to write it.

    Raises:
        UsageError: this rank has no memory for such an array.
    """
    array = made(np.zeros if zeros else np.empty, shape, like.flat.dtype, "F" if like.order == "F" else "C")
    flat = array.reshape(-1) if like.order == "C" else array.T.reshape(-1)
    return array, Operand(flat, like.dtype, shape, like.order)


class Memory(Protocol):
    """Where the arrays of a call are, on the host or on a device: makes their operands, and new arrays for results."""

    def source(self, x: Any, name: str = "x", *, any_order: bool = True) -> Operand:
        """Return the operand for an array that a call reads, as the function `source` does."""

    def target(self, out: Any, name: str = "out") -> Operand:
        """Return the operand for an array to which a call writes, as the function `target` does."""

    def new(self, shape: tuple[int, ...], like: Operand, *, zeros: bool = False) -> tuple[Any, Operand]:
        """Return a new array and its operand, as the function `new` does."""

    def wrapped(self, array: Any, x: Any) -> tuple[Any, Callable[[AnyArray], Any] | None]:
        """Return a new array in the caller's library, or a function that makes one; see `adapters.wrapped`."""


class _Host:
    """The place of a call whose arrays are all in host memory."""

    source = staticmethod(source)
    target = staticmethod(target)
    new = staticmethod(new)
    wrapped = staticmethod(adapters.wrapped)


HOST: Memory = _Host()


def list_of(x: Any, out: Any) -> type[Any] | None:
    """Return the type, list or tuple, of `x` (of `out` if `x` is None) when it holds several arrays; None for one."""
    list_type = type(out if x is None else x)
    return list_type if list_type in LISTS else None


def outs_of(x: Sequence[Any], out: Any) -> Sequence[Any]:
    """Return the array for the result of each array in `x`: the items of `out`, or None for each if `out` is None.

    Raises:
        UsageError: `out` is not a list of as many arrays.
    """
    if out is None:
        return [None] * len(x)
    if type(out) not in LISTS or len(out) != len(x):
        raise UsageError(f"x is {len(x)} arrays, and out is not: pass a list with an array for each of them")
    return out  # type: ignore[no-any-return]


def target_like(x: Any) -> Any:
    """Return a new array with the shape and dtype of the array `x`; None if its class is not in `MAKERS`.

    For a list or tuple of arrays, return a list or tuple of results.
    """
    if type(x) in LISTS:
        return type(x)([maker.like(array) if (maker := MAKERS.get(type(array))) else None for array in x])
    maker = MAKERS.get(type(x))
    return None if maker is None else maker.like(x)


def zeros_like(x: Any) -> Any:
    """Return an array of zeros with the shape and dtype of the array `x`; None if its class is not in `MAKERS`.

    For a list or tuple of arrays, return a list or tuple of results.
    """
    maker = MAKERS.get(type(x))
    if maker is not None:
        return maker.zeros_like(x)
    return type(x)(map(zeros_like, x)) if type(x) in LISTS else None


def target_of_all(x: Any, size: int) -> Any:
    """Return a new array for the concatenation of `size` arrays like `x`; None if `x` has no rows, or as `target_like`.

    For a list or tuple of arrays, return a list or tuple of results.
    """
    if type(x) in LISTS:
        return type(x)(target_of_all(array, size) for array in x)
    return _of_rows(x, lambda rows: size * rows)


def target_of_share(x: Any, size: int) -> Any:
    """Return a new array for one of `size` equal shares of `x`; None if `x` has no rows, or as `target_like`.

    For a list or tuple of arrays, return a list or tuple of results.
    """
    if type(x) in LISTS:
        return type(x)(target_of_share(array, size) for array in x)
    return _of_rows(x, lambda rows: rows // size)


def _of_rows(x: Any, rows_of: Callable[[int], int]) -> Any:
    """Return a new array like `x` with another number of rows, which `rows_of` computes."""
    maker = MAKERS.get(type(x))
    if maker is None or x.ndim == 0:
        return None
    rows, *rest = x.shape
    return maker.of_shape(x, (rows_of(rows), *rest))


def dtype_of(array: AnyArray, name: str) -> DType:
    """Return Unisono's dtype of `array`; raises the errors of `check_dtype`."""
    return _DTYPES.get(array.dtype) or check_dtype(array.dtype, name)


def check_dtype(dtype: np.dtype[Any], name: str) -> DType:
    """Return Unisono's dtype for a dtype of numpy. `name` is the array that the error names.

    Raises:
        UsageError: elements of this dtype cannot be sent; the message says what to do.
    """
    supported = _DTYPES.get(dtype) or known_dtype(dtype) or _moved_as_bytes(dtype)
    if supported is not None:
        _DTYPES[dtype] = supported
        return supported
    raise UsageError(f"{name} has dtype {dtype}, which cannot be sent: {_advice(dtype, name)}")


def _moved_as_bytes(dtype: np.dtype[Any]) -> DType | None:
    from unisono.transports.contracts.byte_dtypes import byte_dtype  # most programs do not need it

    return byte_dtype(dtype)


_ADVICE_ON_FIELDS = (
    "its elements have no bytes, or a field is an extended float, whose bytes differ between machines; pass the other "
    "fields separately"
)


def _advice(dtype: np.dtype[Any], name: str) -> str:
    if dtype.hasobject:
        return (
            "its elements are or contain Python objects, whose addresses mean nothing elsewhere; convert it "
            "with astype to a numeric dtype, or use a method for objects, such as broadcast_object"
        )
    if dtype.names is not None or dtype.itemsize == 0:
        return _ADVICE_ON_FIELDS
    if DTYPES.get(dtype.name) is not None:
        return f"its byte order is not this machine's; convert it with astype({dtype.name!r})"
    if not dtype.isnative:
        return f"its byte order is not this machine's; convert it with astype({dtype.newbyteorder('=').str!r})"
    return f"convert it with astype to one of {', '.join(DTYPES)}"


def check_fit(out: Operand, x: Operand, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Check that `out` has the dtype and memory order of `x`, and one of these shapes.

    Raises:
        UsageError: one of them differs.
    """
    if out.dtype is not x.dtype:
        raise UsageError(f"out has dtype {out.dtype.name} and x has {x.dtype.name}: they must be the same")
    if out.shape not in shapes:
        expected = " or ".join(str(shape) for shape in shapes)
        raise UsageError(f"out has shape {out.shape}, and x has {x.shape}: pass an out of shape {expected}")
    if out.order != x.order and out.flat.size > 1:
        raise UsageError(f"out is in {out.order} order and x in {x.order} order: they must be the same")


def in_c_order(operand: Operand, flat: AnyArray) -> Operand:
    """Return an operand like `operand`, whose elements are in `flat`, in C order."""
    return Operand(flat, operand.dtype, operand.shape, "C")


def to_memory_order(flat: AnyArray, out: Operand) -> None:
    """Copy elements in C order to `out`, which is in Fortran order."""
    out.flat[...] = in_fortran_order(flat, out.shape)


def in_fortran_order(flat: AnyArray, shape: tuple[int, ...]) -> AnyArray:
    """Return the elements of an array of this shape, which `flat` holds in C order, in Fortran order."""
    return flat.reshape(shape).reshape(-1, order="F")


def check_message(x: Operand, out: Operand) -> None:
    """Check that a message of `x` may be received into `out`.

    Raises:
        UsageError: the dtypes, the numbers of elements or the shapes differ.
    """
    if (x.dtype, x.flat.size) != (out.dtype, out.flat.size):
        both = f"{x.dtype.name}[{x.flat.size}] and out is {out.dtype.name}[{out.flat.size}]"
        raise UsageError(f"x is {both}: a message has the same dtype and number of elements at both ends")
    shapes = [[length for length in operand.shape if length != 1] for operand in (x, out)]
    if x.flat.size and all(len(shape) > 1 for shape in shapes) and shapes[0] != shapes[1]:
        raise UsageError(f"x has shape {x.shape} and out has {out.shape}: pass arrays of one shape, or flat ones")


def check_apart(pairs: Sequence[tuple[AnyArray | None, AnyArray | None]]) -> None:
    """Check that no target, an array to which a call writes, shares memory with another array of its list or group.

    Args:
        pairs: the source and the target of each array. These two may share memory.

    Raises:
        UsageError: a target shares memory with another array.
    """
    ranges: list[tuple[int, int, bool]] = []  # begin and end address, and whether it is written
    for source, target in pairs:
        addresses = [_addresses(array) for array in (source, target) if array is not None]
        if source is not None and target is not None and np.may_share_memory(source, target):
            ranges.append((min(begin for begin, _ in addresses), max(end for _, end in addresses), True))
        else:
            are_written = [array is target for array in (source, target) if array is not None]
            ranges += [(*pair, is_written) for pair, is_written in zip(addresses, are_written, strict=True)]
    ranges = [(begin, end, is_written) for begin, end, is_written in ranges if begin < end]
    end = written_end = 0
    for begin, array_end, is_written in sorted(ranges):
        if begin < (end if is_written else written_end):
            raise UsageError("an out is in the memory of another array of the same list or group: pass separate arrays")
        end = max(end, array_end)
        written_end = max(written_end, array_end) if is_written else written_end


def _addresses(array: AnyArray) -> tuple[int, int]:
    begin = array.ctypes.data
    return begin, begin + array.nbytes


def share_memory(x: Operand, out: Operand, offset: int | None) -> bool:
    """Return whether a call is in place: whether `out` begins `offset` elements after the beginning of `x`.

    Returns:
        True if so, False if the arrays share no memory.

    Raises:
        UsageError: the arrays share memory in another way, or in any way if `offset` is None.
    """
    if not np.may_share_memory(x.flat, out.flat):
        return False
    if offset is None:
        raise UsageError("x and out share memory: pass separate arrays")
    if out.flat.ctypes.data - x.flat.ctypes.data != offset * x.dtype.itemsize:
        raise UsageError(
            "x and out overlap, but not as a call in place needs: pass the same array if both have the same shape, "
            "this rank's part of the larger array if not, or separate arrays"
        )
    return True
