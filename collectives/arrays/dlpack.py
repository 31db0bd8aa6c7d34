"""Memory of other array libraries, as two protocols describe it: address, shape, dtype and device.

`__cuda_array_interface__` is a dictionary. `__dlpack__` returns a capsule with a C structure, which this module reads
itself because numpy supports neither the bfloat16 nor the float8 of DLPack. Nothing is copied, and no memory of a
device is read or written.

References: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, https://dmlc.github.io/dlpack/latest/c_api.html
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 and float8 with numpy)
import numpy as np

from unisono.errors import UsageError
from unisono.foundation.records import record
from unisono.transports.contracts.call import AnyArray

# DLPack's device types by number. Programs on the host can use the memory of those in `_ON_HOST`.
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
# From DLPack's (type code, bits) to numpy's names.
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
# Exporters should raise BufferError. Some raise one of the others.
_EXPORT_ERRORS = (BufferError, RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError)


@record
class ForeignMemory:
    """An array in memory that belongs to another library.

    Attributes:
        pointer: the address of the first element; 0 if the array is empty.
        shape: the extent of each axis.
        strides: for each axis, the bytes from one element to the next.
        dtype: the type of the elements.
        device: the kind of device, such as ``cuda``, and its number.
        read_only: whether the array must not be written.
        stream: the stream whose work writes the elements, by the protocol's number; None if they are complete.
        owner: an object that keeps the memory alive.
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
        """Whether the CPU can read and write the memory."""
        return self.device[0] in _ON_HOST

    def view(self) -> AnyArray:
        """Return a numpy array in the memory, which it keeps alive. Only elements on the host may be used."""
        # First as plain bytes, because the interface has no names for the dtypes of ml_dtypes.
        plain = np.asarray(_Interface(self, f"|V{self.dtype.itemsize}"))
        array: AnyArray = plain.view(self.dtype)
        return array


class _Interface:
    """The object from which numpy makes an array. The array refers to it, and so to the memory."""

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
    """Return the memory that the `__cuda_array_interface__` of `x` describes. Its device number, unknown, is -1.

    Raises:
        UsageError: the interface of `x`, which the error calls `name`, does not follow version 0, 1, 2 or 3 of the
            protocol, or has a mask.
    """
    interface: Mapping[str, Any] = x.__cuda_array_interface__
    try:
        pointer, read_only = interface["data"]
        shape = tuple(map(int, interface["shape"]))
        dtype = np.dtype(interface["typestr"])
        if dtype.kind == "V":  # the protocol has no names for the dtypes of ml_dtypes
            dtype = np.dtype(getattr(x, "dtype", dtype))
        strides = interface.get("strides")
        stream, mask = interface.get("stream"), interface.get("mask")
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{name} has a __cuda_array_interface__ that breaks the protocol: {error!r}") from None
    if mask is not None:
        raise UsageError(f"{name} has a mask, and masks are not reduced: fill it first")
    if stream == 0:
        raise UsageError(
            f"{name} names the stream 0, which the protocol forbids: pass 1 for the legacy stream, 2 for the thread's"
        )
    steps = packed_strides(shape, dtype.itemsize) if strides is None else tuple(map(int, strides))
    return ForeignMemory(int(pointer or 0), shape, steps, dtype, ("cuda", -1), bool(read_only), stream, x)


def from_dlpack(x: Any, name: str, stream: int | None = None) -> ForeignMemory:
    """Return the memory that `x` exports by `__dlpack__`.

    Args:
        x: the array.
        name: the name of `x` in errors.
        stream: a stream that the library of `x` makes wait for the elements; None if no stream is to wait.

    Raises:
        UsageError: `x` refuses to export itself, or numpy has no dtype for its elements.
    """
    try:
        kind, number = x.__dlpack_device__()
        capsule = capsule_of(x, stream)
        tensor, is_read_only = tensor_in(capsule)
    except _EXPORT_ERRORS as error:
        raise UsageError(f"{name} cannot be exported by __dlpack__: {error}") from error
    element = _ELEMENTS.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if element is None:
        raise UsageError(f"{name} has elements of DLPack's type {tensor.code} with {tensor.bits} bits: convert them")
    dtype = np.dtype(element)
    shape = tuple(tensor.shape[: tensor.ndim])
    # Strides count elements, and may be absent.
    steps = tuple(step * dtype.itemsize for step in tensor.strides[: tensor.ndim]) if tensor.strides else None
    return ForeignMemory(
        (tensor.data or 0) + tensor.byte_offset,
        shape,
        packed_strides(shape, dtype.itemsize) if steps is None else steps,
        dtype,
        (_DEVICES.get(int(kind), f"device {int(kind)}"), int(number)),
        is_read_only,
        stream,
        capsule,
    )


def lend_by_dlpack(x: Any, pointer: int, device: tuple[int, int]) -> Any:
    """Return a DLPack capsule that exports `x` and keeps it alive.

    Args:
        x: an array with the attributes `shape`, `strides` and `dtype` of a numpy array.
        pointer: the address of its first element.
        device: DLPack's device type, and the number of the device.

    Raises:
        BufferError: DLPack has no type for the elements.
    """
    elements = [element for element, name in _ELEMENTS.items() if np.dtype(name) == x.dtype]
    if not elements:
        raise BufferError(f"DLPack has no name for {x.dtype}")
    code, bits = elements[0]
    axes = ctypes.c_int64 * len(x.shape)
    shape, strides = axes(*x.shape), axes(*(step // x.dtype.itemsize for step in x.strides))
    tensor = _Tensor(pointer, *device, len(x.shape), code, bits, 1, shape, strides, 0)
    managed = _ManagedTensor(tensor, None, ctypes.cast(_deleter, ctypes.c_void_p))
    address = ctypes.addressof(managed)
    _exported[address] = managed, shape, strides, x
    return _new_capsule(address, _CAPSULE, _capsule_destructor)


def typestr(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype in the protocols' dictionaries. The dtypes of ml_dtypes have none and become bytes."""
    return dtype.str if dtype.isbuiltin == 1 else f"|V{dtype.itemsize}"


def packed_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the strides, in bytes, of a contiguous array in C order."""
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
# Exported structures by address, each with the objects that it points to. An entry lives until the consumer's release.
_exported: dict[int, tuple[Any, ...]] = {}
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
    """Release the export of a capsule that ends without having been consumed (a consumer renames the capsule)."""
    if _is_named_at(capsule, _CAPSULE):
        _exported.pop(_pointer_at(capsule, _CAPSULE), None)


# The consumer calls the deleter when it no longer needs the memory, in any thread. Python calls the destructor when the
# capsule ends.
_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda address: _exported.pop(address, None) and None)
_capsule_destructor = _Destructor(_drop_unused)


_is_named = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def capsule_of(x: Any, stream: int | None) -> Any:
    """Return the capsule in which an object exports its memory. `stream` is as of `from_dlpack`."""
    arguments = {} if stream is None else {"stream": stream}
    try:
        return x.__dlpack__(max_version=(1, 0), **arguments)
    except TypeError:  # an exporter older than DLPack 1.0, which has no `max_version`
        return x.__dlpack__(**arguments)


def tensor_in(capsule: Any) -> tuple[_Tensor, bool]:
    """Return the structure in a capsule, and whether its memory is read-only.

    The capsule is not marked as consumed. So it releases the memory itself when no object refers to it any more.

    Raises:
        BufferError: the capsule is of an unknown version of DLPack.
        ValueError: the object is no capsule of DLPack.
    """
    if _is_named(capsule, b"dltensor_versioned"):
        versioned = _VersionedTensor.from_address(_pointer_of(capsule, b"dltensor_versioned"))
        if versioned.major != 1:
            raise BufferError(f"version {versioned.major} of DLPack is not supported")
        return versioned.tensor, bool(versioned.flags & _READ_ONLY)
    return _Tensor.from_address(_pointer_of(capsule, b"dltensor")), False
