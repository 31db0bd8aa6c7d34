"""The memory of a window: an array of the user, or a segment that the ranks of a host share.

Theory of operation
-------------------
The lowest rank of each host makes one segment for all parts of the host: a sealed memfd, so no process can shrink it
under a reader. The other ranks open it as ``/proc/<pid>/fd/<number>``, which the kernel allows to processes of the same
user only. They compare its inode, because the number may have come to mean another file. Where that fails, all ranks of
the host use memory of their own, and reach each other through their servers.

The segment begins with a lock for each part, 64 bytes long. The parts follow in the order of ranks, each at a multiple
of 64 bytes, or one right after the other if the window is contiguous.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from unisono.errors import UsageError
from unisono.transports import _core
from unisono.transports.contracts.call import AnyArray
from unisono.transports.host.sealed_memory import sealed_memory

_LINE = 64
_NOT_OPENED = (-1, -1, -1)


class SegmentName(NamedTuple):
    """Where other processes of the host find a segment: process id, number of the descriptor, and inode."""

    pid: int
    descriptor: int
    inode: int


class Layout(NamedTuple):
    """The segment of a host: where the parts of its ranks begin, and its size in bytes."""

    offsets: tuple[int, ...]
    nbytes: int


def layout_of(sizes: Sequence[int], *, is_contiguous: bool) -> Layout:
    """Return the layout of a segment with parts of these sizes in bytes, behind their locks."""
    offsets, end = [], len(sizes) * _LINE
    for nbytes in sizes:
        begin = end if is_contiguous else -(-end // _LINE) * _LINE
        offsets.append(begin)
        end = begin + nbytes
    return Layout(tuple(offsets), end)


class Segment:
    """A segment as this process maps it. Its memory is unmapped when no array and no part refers to it any more."""

    def __init__(self, descriptor: int, layout: Layout) -> None:
        self._descriptor = descriptor
        self._layout = layout
        self._memory = mmap.mmap(descriptor, layout.nbytes)
        with contextlib.suppress(OSError, AttributeError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)

    @classmethod
    def make(cls, layout: Layout) -> Segment:
        """Return a new segment; raises OSError if the system refuses it."""
        descriptor = sealed_memory("unisono-window", layout.nbytes)
        try:
            return cls(descriptor, layout)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def opened(cls, name: SegmentName, layout: Layout) -> Segment:
        """Return the segment of another process; raises OSError if it cannot be opened here."""
        descriptor = os.open(f"/proc/{name.pid}/fd/{name.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            facts = os.fstat(descriptor)
            if (facts.st_ino, facts.st_size) != (name.inode, layout.nbytes):
                raise OSError(f"descriptor {name.descriptor} of process {name.pid} is another file")
            return cls(descriptor, layout)
        finally:
            os.close(descriptor)

    @property
    def name(self) -> SegmentName:
        """The name by which other processes open it, before `close`."""
        return SegmentName(os.getpid(), self._descriptor, os.fstat(self._descriptor).st_ino)

    def close(self) -> None:
        """Close the descriptor of a segment that this process has made; the mapping stays."""
        os.close(self._descriptor)

    def locks(self) -> memoryview:
        """Return the memory of the locks."""
        return memoryview(self._memory)[: len(self._layout.offsets) * _LINE]

    def bytes_of(self, index: int, nbytes: int) -> AnyArray:
        """Return the part of the rank with this index on the host, as bytes."""
        return np.frombuffer(self._memory, np.uint8, nbytes, self._layout.offsets[index])


def own_bytes(array: Any) -> AnyArray:
    """Return the memory of an array of the user, as bytes.

    Raises:
        UsageError: it is no numpy array in C order that can be written, or its elements are not aligned.
    """
    if not isinstance(array, np.ndarray):
        raise UsageError(f"a window needs a numpy array or a shape, not {type(array).__name__}")
    if not (array.flags.c_contiguous and array.flags.writeable):
        raise UsageError("the array of a window must be contiguous in C order, and writable")
    if array.size and array.__array_interface__["data"][0] % array.dtype.itemsize:
        raise UsageError("the elements of the array are not at multiples of their size: pass np.array(x, copy=True)")
    return array.reshape(-1).view(np.uint8)


def private_locks() -> AnyArray:
    """Return new memory of one lock, at a multiple of 64 bytes, for a part that only this process maps."""
    room = np.zeros(2 * _core.WINDOW_LOCK_NBYTES, np.uint8)
    begin = -room.__array_interface__["data"][0] % _core.WINDOW_LOCK_NBYTES
    return room[begin : begin + _core.WINDOW_LOCK_NBYTES]
