"""`HostMemory`: a memfd that several processes of one user map. They open it through ``/proc``.

It has no name in a file system, so nothing remains when its processes have ended, in whatever way.
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


class MemoryHandle(NamedTuple):
    """Identifies memory: the process, its descriptor, the inode, and a number chosen by its creator."""

    process: int
    descriptor: int
    inode: int
    number: int

    def pack(self) -> bytes:
        """Return the handle as bytes for `unpack`."""
        return _HANDLE.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> MemoryHandle:
        """Return the handle that `data` begins with."""
        return cls(*_HANDLE.unpack(data[:HANDLE_NBYTES]))


class HostMemory:
    """A memfd, mapped by this process.

    Attributes:
        view: its bytes.
        address: the address of its first byte.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @property
    def descriptor(self) -> int:
        """The memfd, until `close`."""
        return self._descriptor

    @classmethod
    def new(cls, nbytes: int) -> HostMemory:
        """Return new memory, filled with zeros.

        Raises:
            TransportUnavailableError: the system refuses memory that other processes can map.
        """
        try:
            descriptor = os.memfd_create("unisono-device", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, nbytes)
        except OSError as error:
            raise unavailable("memory for other ranks of this host cannot be created", error) from error
        return cls(descriptor)

    @classmethod
    def opened(cls, handle: MemoryHandle) -> HostMemory:
        """Return memory that another process, or this one, has created.

        Raises:
            TransportUnavailableError: it is not accessible: the process is gone, or of another user or container.
        """
        try:
            descriptor = os.open(f"/proc/{handle.process}/fd/{handle.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TransportUnavailableError(f"memory of process {handle.process} cannot be mapped: {error}") from error
        if os.fstat(descriptor).st_ino != handle.inode:
            os.close(descriptor)
            raise TransportUnavailableError(f"memory of process {handle.process} does not exist any more")
        return cls(descriptor)

    def handle(self, number: int = 0) -> MemoryHandle:
        """Return the handle for other processes, valid until `close`."""
        return MemoryHandle(os.getpid(), self._descriptor, os.fstat(self._descriptor).st_ino, number)

    def empty(self) -> None:
        """Return the pages to the system: in every process, they then read as zeros."""
        self._map.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Close the descriptor. The mapping stays as long as an object refers to it."""
        os.close(self._descriptor)
