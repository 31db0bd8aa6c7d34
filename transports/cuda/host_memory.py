"""Host memory that several processes of one user have mapped, each by itself: a memfd, found by ``/proc``.

It has no name in a file system, so nothing is left of it when its processes have ended, however they ended.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from typing import NamedTuple

from unisono.errors import TransportUnavailableError
from unisono.transports.host.system_limits import unavailable

_HANDLE = struct.Struct("<qqqq")
HANDLE_NBYTES = _HANDLE.size


class Handle(NamedTuple):
    """Where memory is: the process, its descriptor and the inode; and a number that its maker adds."""

    process: int
    descriptor: int
    inode: int
    number: int

    def pack(self) -> bytes:
        """Return the handle as bytes, which `unpack` takes."""
        return _HANDLE.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Handle:
        """Return the handle of which `data` are the first bytes."""
        return cls(*_HANDLE.unpack(data[:HANDLE_NBYTES]))


class HostMemory:
    """A memfd as one process has it mapped.

    Attributes:
        view: its bytes.
        address: that of its first byte.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @property
    def descriptor(self) -> int:
        """The memfd, until it is closed."""
        return self._descriptor

    @classmethod
    def new(cls, nbytes: int) -> HostMemory:
        """Return new memory, of zeros.

        Raises:
            TransportUnavailableError: the system refuses memory that others could map.
        """
        try:
            descriptor = os.memfd_create("unisono-device", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, nbytes)
        except OSError as error:
            raise unavailable("memory for other ranks of this host cannot be made", error) from error
        return cls(descriptor)

    @classmethod
    def opened(cls, handle: Handle) -> HostMemory:
        """Return memory that another process, or this one, has made.

        Raises:
            TransportUnavailableError: it is not found: the process is gone, of another user or of another container.
        """
        try:
            descriptor = os.open(f"/proc/{handle.process}/fd/{handle.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TransportUnavailableError(f"memory of process {handle.process} cannot be mapped: {error}") from error
        if os.fstat(descriptor).st_ino != handle.inode:
            os.close(descriptor)
            raise TransportUnavailableError(f"memory of process {handle.process} is not there any more")
        return cls(descriptor)

    def handle(self, number: int = 0) -> Handle:
        """Return by what others open it, as long as it is not closed here."""
        return Handle(os.getpid(), self._descriptor, os.fstat(self._descriptor).st_ino, number)

    def empty(self) -> None:
        """Give the pages back to the system: they read as zeros, in every process."""
        self._map.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Give the descriptor back. What is mapped stays so while something refers to it."""
        os.close(self._descriptor)
