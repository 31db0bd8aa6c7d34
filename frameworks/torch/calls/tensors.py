"""Tensors in the form that a communicator takes: flat numpy arrays at the same address, or copies of the elements.

A communicator takes a tensor on a GPU as a flat tensor there. Other users get a copy on the host.

`Tensor.numpy` cannot be used, because the memory of the tensor can never be resized after it, and FSDP resizes memory
all the time. Autograd does not notice the writes here, as with the backends of torch: FSDP gathers parameters into
memory that autograd has views of, and expects that their versions stay.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any, TypeAlias

import ml_dtypes  # noqa: F401  (gives numpy the names bfloat16 and float8)
import numpy as np
import torch
from numpy.typing import NDArray

from unisono import UsageError
from unisono.dtypes import DTYPES

Array: TypeAlias = NDArray[Any]
# The form that a communicator takes: a flat array, or a flat tensor on a GPU.
FlatMemory: TypeAlias = "NDArray[Any] | Any"

_TYPES: dict[Any, np.dtype[Any]] = {getattr(torch, name): np.dtype(name) for name in DTYPES}
_TENSOR_TYPES = {dtype: tensor_type for tensor_type, dtype in _TYPES.items()}
# Types that can be moved and not reduced. They travel as an integer type of their size.
ONLY_MOVED: dict[Any, np.dtype[Any]] = {
    torch.float8_e4m3fnuz: np.dtype(np.uint8),
    torch.float8_e5m2fnuz: np.dtype(np.uint8),
    torch.float8_e8m0fnu: np.dtype(np.uint8),
    torch.complex32: np.dtype(np.uint32),
}
# By size in bytes, the type in which they travel on a GPU: torch has few unsigned types.
_MOVED_AS = {1: torch.uint8, 4: torch.int32}
_ALL_TYPES = {**_TYPES, **ONLY_MOVED}

_STRIDED = torch.strided
# The answer of torch for a tensor whose elements share memory.
_OVERLAPS = 1

# Arrays by address, number of elements and type. They own no memory: an array is used only while a tensor lies there.
_arrays: dict[tuple[int, int, Any], Array] = {}
_MOST_ARRAYS = 4096

# Only one thread may make the copies of a call. One lock serves all calls, because copies are short.
_finishing = threading.Lock()


class CallTensors:
    """The memory of one call: it keeps the tensors alive, and copies results to tensors when the call has ended.

    Tensors on a GPU are copied to the host.

    Attributes:
        has_gpu: whether the call uses a tensor on a GPU, there.
    """

    # Defaults in the class: making a stage is a part of the latency of every call, and most stages change one of them.
    has_gpu = False
    _takes_gpu = False
    _used: Any = None  # mostly one tensor; several are a chain of pairs
    _copies: Sequence[tuple[Any, Any]] = ()

    def read(self, tensor: Any) -> FlatMemory:
        """Return the elements of a tensor that the call only reads.

        Raises:
            UsageError: the tensor is sparse, or of a type that cannot be moved.
        """
        return self._array(tensor if self._is_flat(tensor) else self._copy(tensor))

    def write(self, tensor: Any) -> FlatMemory:
        """Return memory with the elements of a tensor. `finish` copies it to the tensor, unless it is the tensor's own.

        Raises:
            UsageError: as for `read`, or several elements of the tensor share memory.
        """
        if self._is_flat(tensor):
            return self._array(tensor)
        copy = self._copy(_writable(tensor))
        self._copies = (*self._copies, (tensor, copy))
        return self._array(copy)

    def read_all(self, tensors: Sequence[Any]) -> FlatMemory:
        """Return the elements of all tensors in one array. Raises the errors of `read`, and one if dtypes differ."""
        joined = self._joined(tensors)
        if joined is None:
            joined = torch.cat([self._copy(each).reshape(-1) for each in tensors])
        return self._array(joined)

    def write_all(self, tensors: Sequence[Any]) -> FlatMemory:
        """Return memory for tensors, one after the other. `finish` copies it to them. Raises as `read_all` does."""
        joined = self._joined(tensors)
        if joined is None:
            device = tensors[0].device if self._is_taken_on_gpu(tensors[0]) else "cpu"
            joined = tensors[0].detach().new_empty(sum(each.numel() for each in tensors), device=device)
            parts = joined.split([each.numel() for each in tensors])
            copies = [(_writable(each), part.view(each.shape)) for each, part in zip(tensors, parts, strict=True)]
            self._copies = (*self._copies, *copies)
        return self._array(joined)

    @property
    def has_copies(self) -> bool:
        """Whether `finish` copies results."""
        return bool(self._copies)

    def finish(self) -> None:
        """Copy the results to the tensors. Call it when the call has ended; several threads may do so."""
        if self._copies:
            with _finishing, torch.inference_mode():  # because tensors created in it can be written only in it
                for tensor, copy in self._copies:
                    tensor.copy_(copy)
                self._copies = ()

    def _array(self, tensor: Any) -> FlatMemory:
        """Return the array at the address of a contiguous tensor; on a GPU, a flat tensor outside of autograd."""
        self._used = tensor if self._used is None else (self._used, tensor)
        if self._is_taken_on_gpu(tensor):
            self.has_gpu = True
            flat = tensor.data.reshape(-1)
            return flat.view(_MOVED_AS[tensor.element_size()]) if tensor.dtype in ONLY_MOVED else flat
        key = tensor.data_ptr(), tensor.numel(), tensor.dtype
        array = _arrays.get(key)
        if array is not None:
            return array
        if not key[0] and hasattr(tensor, "trigger_wait"):  # the result of a functional collective in flight
            return self._array(tensor.trigger_wait())
        return _array_at(*key)

    def _is_taken_on_gpu(self, tensor: Any) -> bool:
        return self._takes_gpu and bool(tensor.is_cuda)

    def _is_flat(self, tensor: Any) -> bool:
        """Return whether the memory of a tensor can be used as it is: contiguous and on the right device."""
        if tensor.layout is not _STRIDED:
            raise UsageError(
                f"a tensor of the layout {tensor.layout} can only be used in all_reduce: pass tensor.to_dense()"
            )
        is_reachable = tensor.is_cpu or self._is_taken_on_gpu(tensor)
        is_flat: bool = is_reachable and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())
        return is_flat

    def _copy(self, tensor: Any) -> Any:
        """Return a contiguous tensor with the same elements on the right device: the tensor itself, or a copy."""
        plain = tensor.detach().resolve_conj().resolve_neg()
        return (plain if self._is_taken_on_gpu(tensor) else plain.cpu()).contiguous()

    def _joined(self, tensors: Sequence[Any]) -> Any:
        """Return one flat tensor over the memory of all tensors, or None if they do not lie one after the other.

        Raises:
            UsageError: the types or devices of the tensors differ, or there are no tensors.
        """
        if len({(each.dtype, each.device) for each in tensors}) != 1:
            kinds = ", ".join(dict.fromkeys(f"{each.dtype} on {each.device}" for each in tensors))
            raise UsageError(f"the tensors of a list must be of one dtype and device; got {kinds or 'none'}")
        nonempty = [each for each in tensors if each.numel()]
        if not nonempty:
            return self._copy(tensors[0]).reshape(-1)
        first, end = nonempty[0], nonempty[0].data_ptr()
        for tensor in nonempty:
            if not self._is_flat(tensor) or tensor.data_ptr() != end:
                return None
            if tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
                return None
            end += tensor.numel() * tensor.element_size()
        return first.detach().as_strided((sum(each.numel() for each in nonempty),), (1,))


def plain_memory(tensor: Any) -> Array | None:
    """Return the array at the address of a contiguous tensor on the host, if an earlier call has made it; or None.

    It is the short way of `CallTensors.read` and `CallTensors.write` for a tensor that a program passes again.
    """
    if tensor.layout is _STRIDED and tensor.is_cpu and tensor.is_contiguous():
        array = _arrays.get((tensor.data_ptr(), tensor.numel(), tensor.dtype))
        if array is not None and not (tensor.is_neg() or tensor.is_conj()):
            return array
    return None


class GpuStage(CallTensors):
    """The memory of a call that uses tensors on a GPU there."""

    _takes_gpu = True


def address_of(x: FlatMemory) -> int:
    """Return the address of the first element."""
    return int(x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr())


def disjoint(x: FlatMemory, out: FlatMemory) -> FlatMemory:
    """Return `x`, or a copy of it if it overlaps `out`. Both are flat."""
    begin, written = address_of(x), address_of(out)
    if begin < written + out.nbytes and written < begin + x.nbytes:
        return x.copy() if isinstance(x, np.ndarray) else x.clone()
    return x


def _writable(tensor: Any) -> Any:
    if torch._debug_has_internal_overlap(tensor) == _OVERLAPS:
        raise UsageError(
            "several elements of a tensor share memory, as after expand(), so it cannot be written: pass a clone()"
        )
    return tensor


def _array_at(address: int, count: int, dtype: Any) -> Array:
    numpy_dtype = _ALL_TYPES.get(dtype)
    if numpy_dtype is None:
        raise UsageError(f"tensors of {dtype} cannot be moved: convert them to another dtype")
    if count == 0:
        return np.empty(0, numpy_dtype)
    if not address:
        raise UsageError("a tensor has no memory: pass to_local() of a DTensor, and no tensor whose memory was freed")
    if len(_arrays) >= _MOST_ARRAYS:
        _arrays.clear()
    memory = (ctypes.c_byte * (count * numpy_dtype.itemsize)).from_address(address)
    array: Array = np.frombuffer(memoryview(memory), numpy_dtype)
    _arrays[address, count, dtype] = array
    return array


def tensor_of(array: Array) -> Any:
    """Return a tensor over the memory of a contiguous array, with its dtype and shape."""
    return torch.from_numpy(array.reshape(-1).view(np.uint8)).view(_TENSOR_TYPES[array.dtype]).view(array.shape)


def array_of(tensor: Any) -> Array:
    """Return an array with the elements of a tensor. An array is returned as it is."""
    if isinstance(tensor, np.ndarray):
        return tensor
    plain = tensor.detach().cpu().contiguous()
    array: Array = plain.view(-1).view(torch.uint8).numpy().view(_TYPES[plain.dtype]).reshape(plain.shape)
    return array


def like(parameter: Any, array: Array) -> Any:
    """Return a tensor over the memory of an array, with the dtype, shape and device of a parameter."""
    flat = torch.from_numpy(array.reshape(-1).view(np.uint8))
    return flat.view(parameter.dtype).view(parameter.shape).to(parameter.device)
