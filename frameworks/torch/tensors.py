"""Tensors as collectives take them: flat numpy arrays at the same address, or a copy where that cannot be.

Those on a GPU are taken as they are, as flat tensors, where they go to a communicator; otherwise they are copied.

`Tensor.numpy` will not do: it makes the tensor's memory one that can never be resized, which FSDP does all the time.
Nor is what is written here told to autograd, as with torch's own backends: FSDP gathers parameters into memory that
autograd has views of, and expects that no version changes.
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
# What a communicator takes: an array, or a tensor on a GPU.
Taken: TypeAlias = "NDArray[Any] | Any"

_TYPES: dict[Any, np.dtype[Any]] = {getattr(torch, name): np.dtype(name) for name in DTYPES}
# Types that are moved and not reduced, and so may be anything of their size.
ONLY_MOVED: dict[Any, np.dtype[Any]] = {
    torch.float8_e4m3fnuz: np.dtype(np.uint8),
    torch.float8_e5m2fnuz: np.dtype(np.uint8),
    torch.float8_e8m0fnu: np.dtype(np.uint8),
    torch.complex32: np.dtype(np.uint32),
}
# The same on a GPU: torch has few types without a sign.
_MOVED_AS = {1: torch.uint8, 4: torch.int32}
_ALL_TYPES = {**_TYPES, **ONLY_MOVED}

_STRIDED = torch.strided
# What torch answers where elements of a tensor share memory.
_OVERLAPS = 1

# Arrays by address, number of elements and type. They own nothing: each is used only while a tensor lies there.
_arrays: dict[tuple[int, int, Any], Array] = {}
_MOST_ARRAYS = 4096

# Copies are short, and only one thread may make those of a call.
_finishing = threading.Lock()


class Stage:
    """The memory of one call, which this keeps alive, and what must be copied to tensors when it has ended.

    Args:
        takes_gpu: whether tensors on a GPU are used there, and not by a copy on the host.

    Attributes:
        has_gpu: whether there were any.
    """

    __slots__ = ("_copies", "_takes_gpu", "_used", "has_gpu")

    def __init__(self, *, takes_gpu: bool = False) -> None:
        self._takes_gpu = takes_gpu
        self.has_gpu = False
        self._used: Any = None  # one tensor, mostly; of several, a chain of pairs
        self._copies: Sequence[tuple[Any, Any]] = ()

    def read(self, tensor: Any) -> Taken:
        """Return the elements of a tensor, which is not written.

        Raises:
            UsageError: it is sparse, or of a type that cannot be moved.
        """
        return self._array(tensor if self._is_flat(tensor) else self._copy(tensor))

    def write(self, tensor: Any) -> Taken:
        """Return memory whose elements a tensor gets in the end; they are its own now.

        Raises:
            UsageError: what `read` raises, or several of the tensor's elements lie at one place.
        """
        if self._is_flat(tensor):
            return self._array(tensor)
        copy = self._copy(_writable(tensor))
        self._copies = (*self._copies, (tensor, copy))
        return self._array(copy)

    def read_all(self, tensors: Sequence[Any]) -> Taken:
        """Return the elements of tensors, one after the other. Raises what `read` does, and if the types differ."""
        joined = self._joined(tensors)
        if joined is None:
            joined = torch.cat([self._copy(each).reshape(-1) for each in tensors])
        return self._array(joined)

    def write_all(self, tensors: Sequence[Any]) -> Taken:
        """Return memory whose elements tensors get in the end, one after the other; raises what `read_all` does."""
        joined = self._joined(tensors)
        if joined is None:
            place = tensors[0].device if self._is_taken_on_gpu(tensors[0]) else "cpu"
            joined = tensors[0].detach().new_empty(sum(each.numel() for each in tensors), device=place)
            parts = joined.split([each.numel() for each in tensors])
            copies = [(_writable(each), part.view(each.shape)) for each, part in zip(tensors, parts, strict=True)]
            self._copies = (*self._copies, *copies)
        return self._array(joined)

    def finish(self) -> None:
        """Copy what must be copied; to be called when the call has ended, by as many threads as want to."""
        if self._copies:
            with _finishing, torch.inference_mode():  # outside of which no thread may write the tensors made in it
                for tensor, copy in self._copies:
                    tensor.copy_(copy)
                self._copies = ()

    def _array(self, tensor: Any) -> Taken:
        """Return the array at the address of a contiguous tensor; on a GPU, a flat tensor that autograd knows not."""
        self._used = tensor if self._used is None else (self._used, tensor)
        if self._is_taken_on_gpu(tensor):
            self.has_gpu = True
            flat = tensor.data.reshape(-1)
            return flat.view(_MOVED_AS[tensor.element_size()]) if tensor.dtype in ONLY_MOVED else flat
        place = tensor.data_ptr(), tensor.numel(), tensor.dtype
        array = _arrays.get(place)
        if array is not None:
            return array
        if not place[0] and hasattr(tensor, "trigger_wait"):  # the result of a functional collective, which goes on
            return self._array(tensor.trigger_wait())
        return _array_at(*place)

    def _is_taken_on_gpu(self, tensor: Any) -> bool:
        return self._takes_gpu and bool(tensor.is_cuda)

    def _is_flat(self, tensor: Any) -> bool:
        """Return whether a tensor lies where it is taken as an array would."""
        if tensor.layout is not _STRIDED:
            raise UsageError(
                f"a tensor of the layout {tensor.layout} goes through all_reduce alone: pass tensor.to_dense()"
            )
        is_there = tensor.is_cpu or self._is_taken_on_gpu(tensor)
        is_flat: bool = is_there and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())
        return is_flat

    def _copy(self, tensor: Any) -> Any:
        """Return a contiguous tensor with the same elements where tensors are taken, a copy unless it is one."""
        plain = tensor.detach().resolve_conj().resolve_neg()
        return (plain if self._is_taken_on_gpu(tensor) else plain.cpu()).contiguous()

    def _joined(self, tensors: Sequence[Any]) -> Any:
        """Return one flat tensor in the memory of all, if they lie there one after the other; otherwise None.

        Raises:
            UsageError: their types differ, or there are none.
        """
        if len({(each.dtype, each.device) for each in tensors}) != 1:
            kinds = ", ".join(dict.fromkeys(f"{each.dtype} on {each.device}" for each in tensors))
            raise UsageError(f"the tensors of a list must be of one dtype and device; got {kinds or 'none'}")
        full = [each for each in tensors if each.numel()]
        if not full:
            return self._copy(tensors[0]).reshape(-1)
        first, end = full[0], full[0].data_ptr()
        for each in full:
            if not self._is_flat(each) or each.data_ptr() != end:
                return None
            if each.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
                return None
            end += each.numel() * each.element_size()
        return first.detach().as_strided((sum(each.numel() for each in full),), (1,))


def lies_at(x: Taken) -> int:
    """Return the address of the first element of what was taken."""
    return int(x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr())


def apart(x: Taken, out: Taken) -> Taken:
    """Return `x`, or a copy of it if it is in the memory of `out`; both are flat."""
    begin, written = lies_at(x), lies_at(out)
    if begin < written + out.nbytes and written < begin + x.nbytes:
        return x.copy() if isinstance(x, np.ndarray) else x.clone()
    return x


def _writable(tensor: Any) -> Any:
    if torch._debug_has_internal_overlap(tensor) == _OVERLAPS:
        raise UsageError(
            "a tensor of which elements lie at one place, as after expand(), gets no result: pass a clone()"
        )
    return tensor


def _array_at(address: int, count: int, dtype: Any) -> Array:
    found = _ALL_TYPES.get(dtype)
    if found is None:
        raise UsageError(f"tensors of {dtype} cannot be moved: convert them")
    if count == 0:
        return np.empty(0, found)
    if not address:
        raise UsageError("a tensor has no memory: pass what a DTensor's to_local() returns, and nothing that was freed")
    if len(_arrays) >= _MOST_ARRAYS:
        _arrays.clear()
    memory = (ctypes.c_byte * (count * found.itemsize)).from_address(address)
    array: Array = np.frombuffer(memoryview(memory), found)
    _arrays[address, count, dtype] = array
    return array


def like(parameter: Any, array: Array) -> Any:
    """Return a tensor in the memory of an array, of the dtype, shape and device of a parameter."""
    flat = torch.from_numpy(array.reshape(-1).view(np.uint8))
    return flat.view(parameter.dtype).view(parameter.shape).to(parameter.device)
