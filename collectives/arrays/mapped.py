"""`un.empty`: arrays in shared memory that the ranks of a host map, so that messages need no copy."""

from __future__ import annotations

import math
import mmap
import operator
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike

from unisono.collectives.arrays.operands import check_dtype
from unisono.dtypes import DTYPES
from unisono.errors import UsageError
from unisono.foundation import log
from unisono.foundation.once import once_per_process
from unisono.transports import _core
from unisono.transports.contracts.call import AnyArray
from unisono.transports.host.system_limits import unavailable
from unisono.transports.reductions.definition import numpy_dtype

_log = log.get("calls")


@overload
def empty(shape: int | Sequence[int], dtype: DTypeLike, device: None = None) -> AnyArray: ...


@overload
def empty(shape: int | Sequence[int], dtype: DTypeLike, device: str) -> Any: ...


def empty(shape: int | Sequence[int], dtype: DTypeLike, device: str | None = None) -> Any:
    """Return a new array in memory that other ranks on this host read directly: of numpy, or on a GPU.

    Collectives, sends and receives take the array like any other, in whole or as a contiguous view, on some ranks or on
    all. When a rank sends from it to a rank of the same host, the receiver reads the elements there, without a copy on
    the way.

    If the system refuses such memory (no ``memfd_create``, no free file descriptor), the array is in ordinary memory,
    and calls copy from it as from any other array. A warning says so, once in a process.

    The array needs no communicator and outlives any. Its memory is freed when the array and its views are gone, and no
    rank maps it any more. A rank that has read from it unmaps it when another array is sent in its place, or when its
    communicator ends.

    In a forked child, the array becomes private memory: the parent does not see the child's writes. The child sees the
    parent's writes in each page that the child has not written.

    With a `device`, the array is in memory of that GPU, and its elements are undefined. It is an array of CuPy if that
    is installed and has the dtype, and else one with ``__cuda_array_interface__`` and ``__dlpack__``. Persistent calls
    (`Communicator.plan`) let other ranks of the host read it where it lies. Its memory is freed when the array has
    gone, and all communicators whose persistent calls have used it are closed.

    Args:
        shape: a number of elements, or the extent of each dimension.
        dtype: the dtype of the elements, one that collectives take.
        device: None for memory of the host, or a GPU of this process: ``"cuda"`` for the first one, or ``"cuda:N"``.

    Returns:
        On the host, a writable array of zeros in C order. It begins at a multiple of 64 bytes (in fact at a page). The
        system provides the memory in whole pages, when they are first touched. Each array holds one file descriptor, so
        use this for arrays of 100 KiB and more, made once and used often.

    Raises:
        UsageError: `shape` is not a shape, elements of `dtype` cannot be sent, or there is no such `device`.
        TransportUnavailableError: the GPU cannot be used here, or has too little memory.
        MemoryError: the system does not have that much memory.
    """
    extents = extents_of(shape)
    element = element_of(dtype)
    nbytes = math.prod(extents) * element.itemsize
    if device is not None:
        from unisono.collectives.device import registered_arrays

        return registered_arrays.empty(extents, element, device)
    if nbytes == 0:
        return np.empty(extents, element)
    if nbytes > np.iinfo(np.intp).max:
        raise MemoryError(f"an array of {nbytes} bytes is larger than an address space: pass a smaller shape")
    array: AnyArray = np.ndarray(extents, element, buffer=_zeros(nbytes))
    return array


def _zeros(nbytes: int) -> memoryview:
    """Return zeroed memory that begins at a page. Peers can map it unless the system refuses an arena."""
    try:
        return memoryview(_core.Arena(nbytes))
    except OSError as error:
        _warn_of_ordinary_memory(str(unavailable("un.empty gives ordinary memory", error)))
    try:
        return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except OSError as error:
        raise MemoryError(f"the system has no memory for an array of {nbytes} bytes: {error.strerror}") from error


@once_per_process
def _warn_of_ordinary_memory(text: str) -> None:
    _log.warning("%s", text)


def extents_of(shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return the extents of a shape as the user passed it; raises `UsageError` if it is none."""
    try:
        extents = tuple(map(operator.index, shape)) if isinstance(shape, Sequence) else (operator.index(shape),)
    except TypeError:
        raise UsageError(f"shape must be an integer or a sequence of integers, not {shape!r}") from None
    if any(extent < 0 for extent in extents):
        raise UsageError(f"no extent in shape may be negative; got {shape!r}")
    return extents


def element_of(dtype: DTypeLike) -> np.dtype[np.generic]:
    """Return numpy's dtype of a dtype as the user passed it; raises `UsageError` if its elements cannot be sent."""
    named = DTYPES.get(dtype) if isinstance(dtype, str) else None  # also names that numpy lacks, as bfloat16
    try:
        element = np.dtype(dtype) if named is None else numpy_dtype(named)
    except TypeError as error:
        raise UsageError(f"dtype={dtype!r} is not a dtype: {error}") from None
    check_dtype(element, "the array")
    return element
