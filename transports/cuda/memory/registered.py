"""Registered memory of a device: memory that other processes may open, for arrays that they read where they lie.

Theory of operation
-------------------
Memory for export is allocated by itself, because a handle opens the whole allocation. Communicators that show it to
other ranks hold it. So it is freed only when its array has gone *and* the last communicator has released it: the other
ranks have closed it by then. A process opens a handle once, however many of its communicators need it.
"""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from unisono.transports.cuda.device import Allocation, Device


class RegisteredBlock:
    """Registered memory.

    Attributes:
        allocation: the memory.
    """

    def __init__(self, allocation: Allocation) -> None:
        self.allocation = allocation
        self.handle = b""  # once it has been exported
        self.holders = 0
        self.has_array = True

    def covers(self, pointer: int, nbytes: int) -> bool:
        """Return whether the bytes at an address are in this memory."""
        start, stop = self.allocation.pointer, self.allocation.pointer + self.allocation.nbytes
        return self.has_array and start <= pointer and pointer + nbytes <= stop


class Registry:
    """The registered memory of one device in this process, and the memory of other processes that it has opened.

    Any thread may use it.


    Args:
        device: the device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        # Finalizers retire blocks, at any point of any thread, and so perhaps while this thread has the lock.
        self._lock = threading.RLock()
        self._blocks: dict[int, RegisteredBlock] = {}
        self._opened: dict[bytes, _Opened] = {}

    def new(self, nbytes: int) -> RegisteredBlock:
        """Return new memory; raises `TransportUnavailableError` if the device has too little."""
        block = RegisteredBlock(self._device.allocate(max(1, nbytes)))
        self._blocks[block.allocation.pointer] = block
        return block

    def find(self, pointer: int, nbytes: int) -> RegisteredBlock | None:
        """Return the memory of a living array that has these bytes; None if they are in no such memory."""
        if not nbytes:
            return None
        return next((block for block in list(self._blocks.values()) if block.covers(pointer, nbytes)), None)

    def retire(self, block: RegisteredBlock) -> None:
        """Take notice that no object refers to the array any more."""
        with self._lock:
            block.has_array = False
            self._free_if_unused(block)

    def hold(self, block: RegisteredBlock) -> bytes:
        """Keep memory allocated until `release`, and return the handle with which other processes open it."""
        with self._lock:
            block.handle = block.handle or self._device.export(block.allocation)
            block.holders += 1
            return block.handle

    def release(self, block: RegisteredBlock) -> None:
        """Undo `hold`; the other processes have closed the memory."""
        with self._lock:
            block.holders -= 1
            self._free_if_unused(block)

    def open(self, handle: bytes) -> int:
        """Return the address here of memory that another process exported.

        Raises:
            TransportUnavailableError: the memory cannot be mapped.
        """
        with self._lock:
            opened = self._opened.get(handle)
            if opened is None:
                opened = self._opened[handle] = _Opened(self._device.open(handle))
            opened.users += 1
            return opened.allocation.pointer

    def close(self, handle: bytes) -> None:
        """Undo one `open`."""
        with self._lock:
            opened = self._opened[handle]
            opened.users -= 1
            if not opened.users:
                del self._opened[handle]
                self._device.close(opened.allocation)

    def _free_if_unused(self, block: RegisteredBlock) -> None:
        if not block.holders and not block.has_array:
            del self._blocks[block.allocation.pointer]
            self._device.give(block.allocation, None)  # any stream of the program may have used the array


class _Opened:
    """Memory of another process, and how many times it has been opened."""

    def __init__(self, allocation: Allocation) -> None:
        self.allocation = allocation
        self.users = 0


_registries: WeakKeyDictionary[Device, Registry] = WeakKeyDictionary()
_lock = threading.Lock()


def registry_of(device: Device) -> Registry:
    """Return the registry of a device."""
    with _lock:
        return _registries.setdefault(device, Registry(device))
