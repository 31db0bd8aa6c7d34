"""Host staging: what ranks exchange goes through pinned memory of the host, where no better way leads to a device.

Theory of operation. A call is cut into segments, and there are two slots of pinned memory. While the ranks exchange one
segment in a slot, the device copies the next one into the other, and before that the result of the last one out of it:

    to the host      0  1  2  3
    between ranks       0  1  2  3
    to the device          0  1  2  3

The host must see that a segment has arrived before it can be exchanged, so this blocks the thread that it is done in;
but it waits for nothing else of the device, and when it returns, the last results may still be on their way to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from unisono.deadlines import Deadline
from unisono.errors import CollectiveTimeoutError, UnisonoError
from unisono.transports.contracts.call import AnyArray
from unisono.transports.cuda.device import Device, Event, Stream

# The time between two looks at an event grows from the first to the second.
_SHORT_LOOK_S, _LONG_LOOK_S = 5e-6, 500e-6
# What the device has of a call when another rank is lost is done in this time, or not at all.
_GRACE_S = 0.1

# Memory of the device: the address of its first byte, and how many there are. At 0 there is none: nothing is copied.
Piece: TypeAlias = tuple[int, int]


class Segment(NamedTuple):
    """A part of a call.

    Attributes:
        reads, writes: what is copied from and to the device; on the host each lies as one, in this order.
        exchange: ``exchange(source, target)`` does on the host, with bytes, what is to be done; it may block.
    """

    reads: Sequence[Piece]
    writes: Sequence[Piece]
    exchange: Callable[[AnyArray, AnyArray], None]


class Staging:
    """The slots of one device, and the streams of their copies. Used by one thread at a time.

    Attributes:
        to_host_nbytes, to_device_nbytes: what has been copied so far.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._down, self._up = device.new_stream(), device.new_stream()
        self._slots = (_Slot(device), _Slot(device))
        self.to_host_nbytes = self.to_device_nbytes = 0

    def run(self, segments: Sequence[Segment], ready: Sequence[Event], finished: Event, deadline: Deadline) -> None:
        """Carry out segments one after the other.

        Args:
            segments: the parts of a call; no part writes what a later one reads.
            ready: events that have been recorded, behind which all copies are ordered.
            finished: an event that is recorded when all has been issued, or all that was until an error.
            deadline: when to give up.

        Raises:
            CollectiveTimeoutError: the device has not copied a segment by then.
            Any error of `exchange`.
        """
        # That holds for copies from the host too, each of which is issued when a copy to the host has been seen to end.
        for event in ready:
            self._device.wait(self._down, event)
        try:
            self._fetch(0, segments)
            for index, segment in enumerate(segments):
                self._fetch(index + 1, segments)
                self._pass_on(segment, self._slots[index % 2], deadline)
        except BaseException:
            for slot in self._slots:  # what is on its way to the host, nobody has seen end
                self._device.wait(self._up, slot.fetched)
            raise
        finally:
            self._device.record(finished, self._up)

    def close(self, deadline: Deadline) -> None:
        """Give everything back, when the device has done what was issued, or at the deadline as it is."""
        for slot in self._slots:
            try:
                for event in (slot.fetched, slot.stored):
                    await_event(self._device, event, deadline)
            except CollectiveTimeoutError:
                return  # which leaks, but memory must not be taken from under a copy
            slot.close()
        for stream in (self._down, self._up):
            self._device.end_stream(stream)

    def _pass_on(self, segment: Segment, slot: _Slot, deadline: Deadline) -> None:
        """Exchange a segment when it has come to the host, and issue the copies of the result."""
        await_event(self._device, slot.fetched, deadline)
        await_event(self._device, slot.stored, deadline)  # the result of the segment before last has left the slot
        target = slot.target.of(_nbytes(segment.writes))
        segment.exchange(slot.source.of(_nbytes(segment.reads)), target)
        self.to_device_nbytes += target.nbytes
        self._copy(segment.writes, target, self._up, to_host=False)
        self._device.record(slot.stored, self._up)

    def _fetch(self, index: int, segments: Sequence[Segment]) -> None:
        """Issue the copies of a segment to the host, if there is such a segment."""
        if index >= len(segments):
            return
        segment, slot = segments[index], self._slots[index % 2]
        source = slot.source.of(_nbytes(segment.reads))
        self.to_host_nbytes += source.nbytes
        self._copy(segment.reads, source, self._down, to_host=True)
        self._device.record(slot.fetched, self._down)

    def _copy(self, pieces: Sequence[Piece], host: AnyArray, stream: Stream, *, to_host: bool) -> None:
        address = host.ctypes.data
        for pointer, nbytes in pieces:
            if pointer and nbytes:
                dst, src = (address, pointer) if to_host else (pointer, address)
                self._device.copy(dst, src, nbytes, stream)
            address += nbytes


class Pinned:
    """Pinned memory of the host that grows when more is needed."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._array: AnyArray | None = None

    def of(self, nbytes: int) -> AnyArray:
        """Return so many bytes, as uint8; what was there may be lost, so no copy of it may be under way."""
        if self._array is None or self._array.nbytes < nbytes:
            self.close()
            self._array = self._device.pin(max(1, nbytes))
        return self._array[:nbytes]

    def close(self) -> None:
        """Give it back."""
        if self._array is not None:
            self._device.unpin(self._array)
        self._array = None


class _Slot:
    """Memory for one segment, and the events that say that it has arrived there and that its result has left."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.source, self.target = Pinned(device), Pinned(device)
        self.fetched, self.stored = device.new_event(), device.new_event()

    def close(self) -> None:
        self.source.close()
        self.target.close()
        for event in (self.fetched, self.stored):
            self._device.end_event(event)


def await_event(device: Device, event: Event, deadline: Deadline, check: Callable[[], None] = lambda: None) -> None:
    """Block until the last record of an event has happened.

    Raises:
        CollectiveTimeoutError: it has not by the deadline.
        Any error of `check`, if it has not soon after: what is behind the work of a rank that is lost may never happen.
    """
    pause_s, lost = _SHORT_LOOK_S, None
    while not device.done(event):
        if lost is None:
            try:
                check()
            except UnisonoError as error:
                lost, deadline = error, Deadline(min(deadline.left_s(), _GRACE_S))
        if deadline.has_passed():
            late = CollectiveTimeoutError(f"{device.name} has not done in time what was issued to it before")
            raise lost or late
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONG_LOOK_S)


def _nbytes(pieces: Sequence[Piece]) -> int:
    return sum(nbytes for _, nbytes in pieces)
