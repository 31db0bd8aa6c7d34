"""`buffer`, the constants that stand for buffers, and the memory of objects."""

from __future__ import annotations

import ctypes
import operator
from typing import Any

import numpy as np

from unisono.compat.mpi4py.base.arguments import whole_arguments

_u1 = np.dtype(np.uint8)


def integer(value: Any) -> int:
    """Return an integer; raises `TypeError` for other numbers."""
    return operator.index(value if not isinstance(value, np.ndarray) or value.ndim == 0 else value.item())


class buffer(np.ndarray):
    """A piece of memory: a flat numpy array of bytes, because that supports the buffer protocol in every Python."""

    def __new__(cls, buf: Any = b"", /) -> Any:
        return cls._of(memory_of(buf) if not isinstance(buf, bytes) or buf else nothing, buf or None)

    @classmethod
    def _of(cls, array: Any, obj: Any) -> Any:
        self = array.view(cls)
        self.obj, self._released = obj, False
        return self

    def __array_finalize__(self, source: Any) -> None:
        self.obj, self._released = getattr(source, "obj", None), False

    @staticmethod
    def allocate(nbytes: int, clear: bool = False) -> Any:
        """Return new memory of this many bytes."""
        if integer(nbytes) < 0:
            raise ValueError("expecting a number of bytes of at least 0")
        memory = (np.zeros if clear else np.empty)(max(nbytes, 1), np.uint8)[:nbytes]
        return buffer._of(memory, memory)

    @staticmethod
    def frombuffer(obj: Any, readonly: bool = False) -> Any:
        """Return the memory of an object."""
        memory = memory_of(obj)
        return buffer._of(_read_only(memory) if readonly else memory, obj)

    @staticmethod
    def fromaddress(address: int, nbytes: int, readonly: bool = False) -> Any:
        """Return memory at an address."""
        if nbytes < 0 or (nbytes > 0 and not address):
            raise ValueError(f"cannot make a buffer of {nbytes} bytes at address {address}")
        memory = at_address(address, nbytes, readonly)
        return buffer._of(memory, memory)

    @property
    def address(self) -> int:
        """The address of the memory."""
        return 0 if self._released or self.obj is None else int(self.ctypes.data)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return 0 if self._released else self.size

    @property
    def readonly(self) -> bool:
        """Whether it cannot be written."""
        return not self._released and not self.flags.writeable

    @property
    def format(self) -> str:
        """The format of an item."""
        return "B"

    def __len__(self) -> int:
        return self.nbytes

    def __bool__(self) -> bool:
        return self.nbytes > 0

    def _item(self, item: Any) -> Any:
        if isinstance(item, slice):
            if item.step not in {None, 1}:
                raise IndexError("slice with step not supported")
            return item
        index = integer(item)
        if not -self.size <= index < self.size:
            raise IndexError("index out of range")
        return index

    def __getitem__(self, item: Any, /) -> Any:
        part = super().__getitem__(self._item(item))
        return part if isinstance(item, slice) else int(part)

    def __setitem__(self, item: Any, value: Any, /) -> None:
        if self.readonly:
            raise TypeError("memory buffer is read-only")
        where = self._item(item)
        if isinstance(where, slice) and not isinstance(value, int):
            value = memory_of(value).view(np.ndarray)
            if value.size != super().__getitem__(where).size:
                raise ValueError("slice assignment: different lengths")
        super().__setitem__(where, value)

    def __delitem__(self, item: Any) -> None:
        raise NotImplementedError("items of memory cannot be deleted")

    def cast(self, format: str, shape: Any = ...) -> memoryview:
        """Return a memoryview of items of another format."""
        view = memoryview(self)  # type: ignore[arg-type]
        return view.cast(format) if shape is ... else view.cast(format, list(shape))  # type: ignore[call-overload]

    def tobytes(self, order: str | None = None) -> bytes:
        """Return the bytes."""
        return super().tobytes()

    def toreadonly(self) -> Any:
        """Return a buffer of the same memory that cannot be written."""
        return buffer._of(_read_only(self.view(np.ndarray)), self.obj)

    def release(self) -> None:
        """Let go of the memory."""
        self.obj, self._released = None, True


_one = np.empty(1, np.uint8)
nothing = _one[:0]


def _read_only(array: Any) -> Any:
    view = array.view()
    view.flags.writeable = False
    return view


def at_address(address: int, nbytes: int, readonly: bool = False) -> Any:
    """Return the memory at an address."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    memory = np.frombuffer(memoryview((ctypes.c_ubyte * nbytes).from_address(address)), np.uint8)
    return _read_only(memory) if readonly else memory


class Special(int):
    """A constant that stands for a buffer."""

    _name: str

    def __new__(cls) -> Any:
        return int.__new__(cls, cls._value)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> Any:
        return self._name

    def _no(self, *_: Any) -> Any:
        return NotImplemented

    __add__ = __radd__ = __sub__ = __mul__ = _no

    def __buffer__(self, flags: int, /) -> memoryview:
        return memoryview(b"")


class BottomType(Special):
    """The type of `BOTTOM`, the address 0."""

    _name, _value = "BOTTOM", 0


class InPlaceType(Special):
    """The type of `IN_PLACE`, which says that the receive buffer has the input."""

    _name, _value = "IN_PLACE", -1


class BufferAutomaticType(Special):
    """The type of `BUFFER_AUTOMATIC`."""

    _name, _value = "BUFFER_AUTOMATIC", -2


BOTTOM, IN_PLACE, BUFFER_AUTOMATIC = BottomType(), InPlaceType(), BufferAutomaticType()


def memory_of(obj: Any, writable: bool = False) -> Any:
    """Return the memory of an object as a flat array of bytes.

    Raises:
        TypeError: the object has no memory.
        BufferError: the memory is not contiguous, cannot be written, or is not on the host.
    """
    if isinstance(obj, np.ndarray):
        flags = obj.flags
        if not (flags.c_contiguous or flags.f_contiguous):
            raise BufferError("ndarray is not contiguous")
        if writable and not flags.writeable:
            raise BufferError("ndarray is read-only")
        flat = obj.reshape(-1, order="A") if obj.dtype.kind != "O" else _no_objects()
        flat = flat.view(np.ndarray)
        return flat.view(_u1) if flat.dtype.itemsize else np.empty(0, np.uint8)
    memory = _memory_of_other(obj)
    if writable and not memory.flags.writeable:
        raise BufferError("the buffer is read-only")
    return memory


def _no_objects() -> Any:
    raise TypeError("an array of Python objects has no memory that can be sent: use the lower-case calls")


def _memory_of_other(obj: Any) -> Any:
    if obj is None:
        raise TypeError("expecting a buffer, got NoneType")
    if isinstance(obj, Special):
        return nothing
    try:
        view = memoryview(obj)
    except TypeError:
        return exported(obj)[0]
    if not view.contiguous:
        raise BufferError("the buffer is not contiguous")
    if view.nbytes == 0:
        return np.empty(0, np.uint8) if not view.readonly else _read_only(np.empty(0, np.uint8))
    return np.frombuffer(view if view.c_contiguous else view.cast("B") if view.ndim == 1 else view.T, np.uint8)  # type: ignore[attr-defined]


def exported(obj: Any) -> tuple[Any, str]:
    """Return the memory of an object with DLPack or the CUDA array interface, and the code of its elements."""
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        from unisono.compat.mpi4py.memory.exported import from_dlpack

        return from_dlpack(obj)
    if getattr(obj, "__cuda_array_interface__", None) is not None:
        from unisono.compat.mpi4py.memory.exported import from_cuda

        return from_cuda(obj)
    raise TypeError(f"expecting a buffer, got {type(obj).__name__}")


def Get_address(location: Any) -> int:
    """Return the address of the memory of an object."""
    if location is None or isinstance(location, Special):
        return int(location or 0)
    memory = memory_of(location)
    return int(memory.ctypes.data)


@whole_arguments
def Alloc_mem(size: int, info: Any = None) -> buffer:
    """Return new memory of this many bytes."""
    return buffer.allocate(size)


def Free_mem(mem: buffer) -> None:
    """Let go of memory."""
    mem.release()


@whole_arguments
def Aint_add(base: int, disp: int) -> int:
    """Return the address that is `disp` bytes behind `base`."""
    return (base + disp + (1 << 63)) % (1 << 64) - (1 << 63)


@whole_arguments
def Aint_diff(addr1: int, addr2: int) -> int:
    """Return the number of bytes from the second address to the first."""
    return (addr1 - addr2 + (1 << 63)) % (1 << 64) - (1 << 63)
