"""Memory of other libraries, as the protocols describe it: where it is, of what shape and type, and on which device.

`__cuda_array_interface__` is a dictionary; `__dlpack__` hands over a capsule with a C structure, which is read here
because numpy knows neither its bfloat16 nor its float8. Nothing is copied, and nothing on a device is touched.

References: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, https://dmlc.github.io/dlpack/latest/c_api.html
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the names bfloat16 and float8)
import numpy as np

from unisono.errors import UsageError
from unisono.records import record
from unisono.transports.contracts.call import AnyArray

# DLPack's device types, by number, and those whose memory any program on the host can use.
_DEVICES = {
    1: "cpu",
    2: "cuda",
    3: "cuda_host",
    8: "metal",
    10: "rocm",
    11: "rocm_host",
    13: "cuda_managed",
    14: "oneapi",
}
_ON_HOST = ("cpu", "cuda_host", "rocm_host")
# DLPack's (type code, bits), and numpy's names.
_ELEMENTS = {
    **{(0, bits): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{(2, bits): f"float{bits}" for bits in (16, 32, 64)},
    **{(5, bits): f"complex{bits}" for bits in (64, 128)},
    (4, 16): "bfloat16",
    (6, 8): "bool",
    (10, 8): "float8_e4m3fn",
    (12, 8): "float8_e5m2",
}
_READ_ONLY = 1
# What exporters raise, besides BufferError as they should.
_REFUSALS = (BufferError, RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError)


@record
class ForeignMemory:
    """An array in memory that belongs to another library.

    Attributes:
        pointer: the address of the first element; 0 if there is none.
        shape: the extent of each axis.
        strides: the bytes from one element to the next, of each axis.
        dtype: the type of the elements.
        device: where it is: the kind of device and its number.
        read_only: whether it must not be written.
        stream: the stream of the device on which the elements get ready, by its protocol's number; None if they are.
        owner: what keeps the memory alive.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    device: tuple[str, int]
    read_only: bool
    stream: int | None
    owner: object

    @property
    def is_on_host(self) -> bool:
        """Whether this process can read and write it like its own."""
        return self.device[0] in _ON_HOST

    def view(self) -> AnyArray:
        """Return the memory, which must be the host's, as a numpy array, which keeps it alive."""
        # As plain bytes first: the interface has no names for the types of ml_dtypes.
        plain = np.asarray(_Interface(self, f"|V{self.dtype.itemsize}"))
        array: AnyArray = plain.view(self.dtype)
        return array


class _Interface:
    """What numpy asks for the memory, and then holds as long as it uses that."""

    def __init__(self, memory: ForeignMemory, typestr: str) -> None:
        self.memory = memory
        self.__array_interface__ = {
            "data": (memory.pointer, memory.read_only),
            "shape": memory.shape,
            "strides": memory.strides,
            "typestr": typestr,
            "version": 3,
        }


def from_cuda_interface(x: Any, name: str) -> ForeignMemory:
    """Return what the `__cuda_array_interface__` of `x` describes; the number of its device is unknown, and so -1.

    Raises:
        UsageError: that of `x`, which the error calls `name`, is not as versions 0 to 3 of the protocol say.
    """
    told: Mapping[str, Any] = x.__cuda_array_interface__
    try:
        pointer, read_only = told["data"]
        shape = tuple(int(extent) for extent in told["shape"])
        dtype = np.dtype(told["typestr"])
        if dtype.kind == "V":  # the protocol has no names for the types of ml_dtypes
            dtype = np.dtype(getattr(x, "dtype", dtype))
        strides = told.get("strides")
        stream, mask = told.get("stream"), told.get("mask")
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{name} has a __cuda_array_interface__ that is not as the protocol says: {error!r}") from None
    if mask is not None:
        raise UsageError(f"{name} has a mask, and masks are not reduced: fill it first")
    if stream == 0:
        raise UsageError(
            f"{name} names the stream 0, which the protocol forbids: 1 is the legacy stream, 2 the thread's"
        )
    steps = packed_strides(shape, dtype.itemsize) if strides is None else tuple(map(int, strides))
    return ForeignMemory(int(pointer or 0), shape, steps, dtype, ("cuda", -1), bool(read_only), stream, x)


def from_dlpack(x: Any, name: str, stream: int | None = None) -> ForeignMemory:
    """Return what `x` exports by `__dlpack__`, on the device that it names.

    Args:
        x: the array.
        name: what errors call it.
        stream: the stream of the device that its library lets wait for the elements; None if nothing waits.

    Raises:
        UsageError: `x`, which the error calls `name`, does not export itself, or elements of a type that numpy has not.
    """
    try:
        kind, number = x.__dlpack_device__()
        capsule = _capsule(x, stream)
        tensor, flags = _tensor(capsule)
    except _REFUSALS as error:
        raise UsageError(f"{name} cannot be exported by __dlpack__: {error}") from error
    element = _ELEMENTS.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if element is None:
        raise UsageError(f"{name} has elements of DLPack's type {tensor.code} with {tensor.bits} bits: convert them")
    dtype = np.dtype(element)
    shape = tuple(tensor.shape[: tensor.ndim])
    # Strides may be absent, and count elements.
    steps = tuple(step * dtype.itemsize for step in tensor.strides[: tensor.ndim]) if tensor.strides else None
    return ForeignMemory(
        (tensor.data or 0) + tensor.byte_offset,
        shape,
        packed_strides(shape, dtype.itemsize) if steps is None else steps,
        dtype,
        (_DEVICES.get(int(kind), f"device {int(kind)}"), int(number)),
        bool(flags & _READ_ONLY),
        stream,
        capsule,
    )


def lend_by_dlpack(x: Any, pointer: int, device: tuple[int, int]) -> Any:
    """Return a capsule of DLPack, which keeps `x` alive.

    Args:
        x: an array, with the attributes `shape`, `strides` and `dtype` of numpy's.
        pointer: the address of its first element.
        device: DLPack's kind and number of where that is.

    Raises:
        BufferError: DLPack has no name for the type of its elements.
    """
    found = [element for element, name in _ELEMENTS.items() if np.dtype(name) == x.dtype]
    if not found:
        raise BufferError(f"DLPack has no name for {x.dtype}")
    code, bits = found[0]
    axes = ctypes.c_int64 * len(x.shape)
    shape, strides = axes(*x.shape), axes(*(step // x.dtype.itemsize for step in x.strides))
    tensor = _Tensor(pointer, *device, len(x.shape), code, bits, 1, shape, strides, 0)
    managed = _ManagedTensor(tensor, None, ctypes.cast(_give_back, ctypes.c_void_p))
    address = ctypes.addressof(managed)
    _lent[address] = managed, shape, strides, x
    return _new_capsule(address, _CAPSULE, _drop)


def typestr(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype in the protocols' dictionaries, which have none for the types of ml_dtypes: bytes."""
    return dtype.str if dtype.isbuiltin == 1 else f"|V{dtype.itemsize}"


def packed_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the strides, in bytes, of an array in C order without gaps."""
    strides = []
    for extent in reversed(shape):
        strides.append(itemsize)
        itemsize *= extent
    return tuple(reversed(strides))


# --- the C structures of DLPack ------------------------------------------------------------------------------------


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _VersionedTensor(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


class _ManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_CAPSULE = b"dltensor"
# What the consumers of capsules use, with what keeps it alive, by the address of its structure.
_lent: dict[int, tuple[Any, ...]] = {}
_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_is_named_at = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer_at = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _Destructor)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def _drop_unused(capsule: int) -> None:
    """Give back what nobody has taken out of a capsule that ends."""
    if _is_named_at(capsule, _CAPSULE):
        _lent.pop(_pointer_at(capsule, _CAPSULE), None)


# The last consumer of what was lent calls the first, in any thread; a capsule that ends, the second.
_give_back = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda address: _lent.pop(address, None) and None)
_drop = _Destructor(_drop_unused)


_is_named = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _capsule(x: Any, stream: int | None) -> Any:
    behind = {} if stream is None else {"stream": stream}
    try:
        return x.__dlpack__(max_version=(1, 0), **behind)
    except TypeError:  # from before versions
        return x.__dlpack__(**behind)


def _tensor(capsule: Any) -> tuple[_Tensor, int]:
    """Return the structure in a capsule and its flags.

    The capsule is not marked as used, so it frees the memory itself when nothing holds it any more.
    """
    if _is_named(capsule, b"dltensor_versioned"):
        versioned = _VersionedTensor.from_address(_pointer_of(capsule, b"dltensor_versioned"))
        if versioned.major != 1:
            raise BufferError(f"version {versioned.major} of DLPack is not known")
        return versioned.tensor, versioned.flags
    return _Tensor.from_address(_pointer_of(capsule, b"dltensor")), 0
