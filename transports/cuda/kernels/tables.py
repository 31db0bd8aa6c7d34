"""`Tables`: numbers for a kernel that are too many for its parameters. They are copied to the device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from unisono.transports.contracts.call import AnyArray
from unisono.transports.cuda.device import Allocation, Device, Event, Stream

_ROOM = 4096  # the least numbers of a table


@dataclass(frozen=True, slots=True)
class _Table:
    """Pinned host memory and device memory for numbers. It may be reused once its event has happened."""

    numbers: AnyArray
    allocation: Allocation
    event: Event


class Tables:
    """The tables of one device, for any thread. Tables are reused and never freed."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._waiting: list[_Table] = []

    @contextlib.contextmanager
    def holding(self, numbers: Sequence[int], stream: Stream) -> Iterator[int]:
        """Yield the device address of a table of `numbers`, valid for work that the body issues to `stream`."""
        table = self._reusable(len(numbers)) or self._new(max(len(numbers), _ROOM))
        table.numbers[: len(numbers)] = numbers
        device = self._device
        try:
            device.copy(table.allocation.pointer, table.numbers.ctypes.data, 8 * len(numbers), stream)
            yield table.allocation.pointer
        finally:
            device.record(table.event, stream)
            with self._lock:
                self._waiting.append(table)

    def _reusable(self, count: int) -> _Table | None:
        with self._lock:
            for i, table in enumerate(self._waiting):
                if len(table.numbers) >= count and self._device.done(table.event):
                    return self._waiting.pop(i)
        return None

    def _new(self, room: int) -> _Table:
        device = self._device
        return _Table(device.pin(8 * room).view(np.uint64), device.allocate(8 * room), device.new_event())
