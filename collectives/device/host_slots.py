"""`Slot`: the memory of one segment of a call across hosts, on the device and on the host."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from unisono.transports.cuda.device import Allocation, Device, Event
from unisono.transports.cuda.executors.staging import Pinned

# Kernels and copies are fastest from multiples of this.
_ALIGNMENT = 256


class Slot:
    """Memory that one segment uses at a time.

    Attributes:
        between: the address on the device of the memory of the call between hosts.
        packed, turned, gathered: the addresses of further memory on the device, for elements in another order.
        host: pinned memory, a copy of `between`.
        fetched, stored: events behind the copy to the host, and behind the last use of the slot.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._allocation: Allocation | None = None
        self._nbytes = 0
        self.between = self.packed = self.turned = self.gathered = 0
        self.host = Pinned(device)
        self.fetched, self.stored = device.new_event(), device.new_event()

    def reserve(
        self, between: int, packed: int, turned: int, gathered: int, wait: Callable[[Event], None], *, pinned: bool
    ) -> None:
        """Lay out each memory with its number of bytes. The slot grows if they do not fit.

        ``wait(event)`` blocks until an event has happened: earlier uses must be over before the slot grows.
        """
        ends = list(accumulate(-(-nbytes // _ALIGNMENT) * _ALIGNMENT for nbytes in (between, packed, turned, gathered)))
        host_nbytes = between if pinned else 0
        if ends[-1] > self._nbytes or not self.host.holds(host_nbytes):
            wait(self.stored)
            self.host.of(host_nbytes)
        if ends[-1] > self._nbytes:
            self._free()
            self._allocation = self._device.allocate(ends[-1])
            self._nbytes = ends[-1]
        start = 0 if self._allocation is None else self._allocation.pointer
        self.between, self.packed, self.turned, self.gathered = (start + end for end in (0, *ends[:-1]))

    @property
    def address(self) -> int:
        """The address of the pinned memory."""
        return self.host.of(0).ctypes.data

    def _free(self) -> None:
        if self._allocation is not None:
            self._device.free(self._allocation)
        self._allocation = None

    def close(self) -> None:
        """Free all memory of the slot, which the device must not use any more."""
        self._free()
        self.host.close()
        for event in (self.fetched, self.stored):
            self._device.end_event(event)
