"""Tables for kernels: numbers that are too many for parameters are copied into the memory of the device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from unisono.transports.contracts.call import AnyArray
from unisono.transports.cuda.device import Allocation, Device, Event, Stream

_ROOM = 4096  # numbers in a table, at least


@dataclass(frozen=True, slots=True)
class _Table:
    """Room for numbers on the host and on the device, which is free again when its event has happened."""

    numbers: AnyArray
    allocation: Allocation
    event: Event


class Tables:
    """The tables of one device, for any thread. There are as many as are in use at a time; none is given back."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._waiting: list[_Table] = []

    @contextlib.contextmanager
    def holding(self, numbers: Sequence[int], stream: Stream) -> Iterator[int]:
        """Give the address of a table of `numbers`, for what the body issues to `stream`."""
        table = self._taken(len(numbers)) or self._made(max(len(numbers), _ROOM))
        table.numbers[: len(numbers)] = numbers
        device = self._device
        device.copy(table.allocation.pointer, table.numbers.ctypes.data, 8 * len(numbers), stream)
        yield table.allocation.pointer
        device.record(table.event, stream)
        with self._lock:
            self._waiting.append(table)

    def _taken(self, count: int) -> _Table | None:
        with self._lock:
            for i, table in enumerate(self._waiting):
                if len(table.numbers) >= count and self._device.done(table.event):
                    return self._waiting.pop(i)
        return None

    def _made(self, room: int) -> _Table:
        device = self._device
        return _Table(device.pin(8 * room).view(np.uint64), device.allocate(8 * room), device.new_event())
