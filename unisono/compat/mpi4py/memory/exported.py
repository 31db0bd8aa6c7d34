"""The memory of objects with DLPack or the CUDA array interface.

Memory of a GPU is refused, because the calls of mpi4py's names read memory on the host. The calls of Unisono's own API
take arrays on a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from unisono.collectives.arrays.dlpack import capsule_of, tensor_in

_CPU = 1
_KINDS = "iufVfc?"  # the kind of numpy by the code of DLPack; code 4 is bfloat16


def from_dlpack(obj: Any) -> tuple[Any, str]:
    """Return the memory and the code of the elements of an object with DLPack.

    Raises:
        BufferError: the memory is not contiguous or not on the host, or the capsule is of another version.
        TypeError, ValueError: the device is no pair of integers.
    """
    device, number = obj.__dlpack_device__()
    if not isinstance(device, int) or not isinstance(number, int):
        raise TypeError("__dlpack_device__ must return two integers")
    capsule = capsule_of(obj, None if device == _CPU else -1)
    try:
        tensor, is_read_only = tensor_in(capsule)
    except ValueError:
        raise BufferError("the object has no capsule of DLPack that can be used") from None
    if tensor.ndim < 0 or (tensor.ndim > 0 and not tensor.shape):
        raise BufferError("the shape of the object is wrong")
    shape = [tensor.shape[k] for k in range(tensor.ndim)]
    strides = [tensor.strides[k] for k in range(tensor.ndim)] if tensor.strides and tensor.ndim else None
    itemsize = tensor.bits * tensor.lanes // 8
    _check_contiguous(shape, strides)
    is_pair = tensor.code == _KINDS.index("f") and tensor.lanes == 2
    kind = "c" if is_pair else _KINDS[tensor.code] if tensor.code < len(_KINDS) else "V"
    code = {"?": "?", "V": "B"}.get(kind) or f"{kind}{itemsize}"
    memory = _memory(int(tensor.data or 0) + tensor.byte_offset, itemsize * int(np.prod(shape)), is_read_only, capsule)
    return memory, code


def from_cuda(obj: Any) -> tuple[Any, str]:
    """Return the memory and the code of the elements of an object with the CUDA array interface.

    Raises:
        BufferError: the memory is not contiguous or not on the host.
        KeyError, TypeError, ValueError: the interface is wrong.
    """
    facts = obj.__cuda_array_interface__
    if not isinstance(facts, dict):
        raise TypeError("__cuda_array_interface__ must be a dictionary")
    address, is_read_only = facts["data"]
    code, shape, strides = facts["typestr"], facts["shape"], facts.get("strides")
    if not isinstance(code, str):
        raise TypeError("typestr must be a text")
    shape, strides = list(shape), None if strides is None else list(strides)
    if facts.get("mask") is not None:
        raise BufferError("arrays with masks are not supported")
    if code[:1] not in {"<", "|", "="}:
        raise BufferError("the bytes of the array are not in the order of this machine")
    itemsize = int(code[2:])
    descr = facts.get("descr")
    if descr is not None and list(descr) != [("", code)]:
        warnings.warn("the field descr of the CUDA array interface is ignored", RuntimeWarning, stacklevel=3)
    if any(extent < 0 for extent in shape):
        raise BufferError("the shape of the array is wrong")
    _check_contiguous(shape, None if strides is None else [stride / itemsize for stride in strides])
    memory = _memory(int(address), itemsize * int(np.prod(shape)), bool(is_read_only), obj)
    return memory, "B" if code[1] == "V" else {"b1": "?"}.get(code[1:], code[1:])


def _check_contiguous(shape: Sequence[int], strides: Sequence[float] | None) -> None:
    if any(extent < 0 for extent in shape):
        raise BufferError("the shape of the array is wrong")
    if strides is None or 0 in shape:
        return
    for order in (range(len(shape)), range(len(shape) - 1, -1, -1)):
        step, fits = 1, True
        for axis in order:
            fits = fits and (shape[axis] == 1 or strides[axis] == step)
            step *= shape[axis]
        if fits:
            return
    raise BufferError("the array is not contiguous")


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _is_of_gpu(address: int) -> bool:
    """Return whether an address is of memory that the host cannot read; the driver of NVIDIA tells."""
    driver, kind = _driver(), ctypes.c_uint(0)
    if driver is None or not address:
        return False
    of_memory_type, on_device = 2, 2
    result = driver.cuPointerGetAttribute(ctypes.byref(kind), of_memory_type, ctypes.c_uint64(address))
    return bool(result == 0 and kind.value == on_device)


def _memory(address: int, nbytes: int, is_read_only: bool, owner: Any) -> Any:
    if nbytes == 0:
        return np.empty(0, np.uint8)
    if _is_of_gpu(address):
        raise BufferError("the array is on a GPU: use the calls of unisono.Communicator, which take it")
    holder = (ctypes.c_ubyte * nbytes).from_address(address)
    holder.owner = owner  # type: ignore[attr-defined]
    memory = np.frombuffer(memoryview(holder), np.uint8)
    memory.flags.writeable = not is_read_only
    return memory
