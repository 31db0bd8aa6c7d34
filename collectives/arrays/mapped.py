"""Arrays in memory that the ranks of a host can map: what they send is not copied on the way."""

from __future__ import annotations

import functools
import math
import mmap
import operator
from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

from unisono import log
from unisono.collectives.arrays.operands import check_dtype
from unisono.dtypes import DTYPES
from unisono.errors import UsageError
from unisono.transports import _core
from unisono.transports.contracts.call import AnyArray
from unisono.transports.host.system_limits import unavailable
from unisono.transports.reductions.definition import numpy_dtype

_log = log.get(log.NAME)


def empty(shape: int | Sequence[int], dtype: DTypeLike) -> AnyArray:
    """Return a new numpy array in memory that other ranks on this host read directly.

    Where the system refuses such memory (no ``memfd_create``, no file descriptor left), the array is in ordinary memory
    and calls copy from it as from any other array; a warning says so, once in a process.

    Collectives, sends and receives take such arrays like any other, in whole or as contiguous views, on some ranks or
    on all; what is sent from them to a rank of the same host is read where it lies. The array works with or without a
    communicator and outlives any. Its memory is freed when it and its views are gone and no rank that has read from it
    still maps it: a rank drops what it has mapped when another array is sent in its place, and with its communicator.
    In a forked child it becomes memory of the child alone: the parent does not see what the child writes. The child
    sees what the parent writes, in each page that the child has not written to itself.

    Args:
        shape: a number of elements, or the extent of each dimension.
        dtype: the type of the elements, one that collectives take.

    Returns:
        A writable array in C order that begins at a multiple of 64 bytes (in fact of a page); its elements are zero
        until they are written. Memory is taken from the system when it is first touched, in whole pages, and each array
        holds one file descriptor, so this is for arrays of 100 KiB and more, to be made once and used often.

    Raises:
        UsageError: there is no such shape, or elements of such a type cannot be sent.
        MemoryError: there is not so much memory.
    """
    extents = _extents(shape)
    element = _element(dtype)
    nbytes = math.prod(extents) * element.itemsize
    if nbytes == 0:
        return np.empty(extents, element)
    if nbytes > np.iinfo(np.intp).max:
        raise MemoryError(f"an array of {nbytes} bytes")
    array: AnyArray = np.ndarray(extents, element, buffer=_zeros(nbytes))
    return array


def _zeros(nbytes: int) -> memoryview:
    """Return so many bytes, at the beginning of a page, that peers can map where the system allows it."""
    try:
        return memoryview(_core.Arena(nbytes))
    except OSError as error:
        _warn_of_ordinary_memory(str(unavailable("un.empty gives ordinary memory", error)))
    try:
        return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except OSError as error:
        raise MemoryError(f"an array of {nbytes} bytes: {error.strerror}") from error


@functools.cache
def _warn_of_ordinary_memory(text: str) -> None:
    _log.warning("%s", text)


def _extents(shape: int | Sequence[int]) -> tuple[int, ...]:
    try:
        extents = tuple(map(operator.index, shape)) if isinstance(shape, Sequence) else (operator.index(shape),)
    except TypeError:
        raise UsageError(f"shape must be an integer or a sequence of integers, not {shape!r}") from None
    if any(extent < 0 for extent in extents):
        raise UsageError(f"shape must not be negative: {shape!r}")
    return extents


def _element(dtype: DTypeLike) -> np.dtype[np.generic]:
    named = DTYPES.get(dtype) if isinstance(dtype, str) else None
    try:
        element = np.dtype(dtype) if named is None else numpy_dtype(named)
    except TypeError as error:
        raise UsageError(f"dtype is not one: {error}") from None
    check_dtype(element, "the array")
    return element
