"""Host staging: ranks exchange device memory through pinned host memory, if no faster way is possible.

Theory of operation
-------------------
A call is cut into parts, and there are two slots of pinned memory. While the ranks exchange one part in one slot, the
device copies the last result out of the other slot and the next part into it:

    to the host      0  1  2  3
    between ranks       0  1  2  3
    to the device          0  1  2  3

The host must see that a part has arrived before it can exchange it, so `Staging.run` blocks its thread. It waits for
nothing else from the device. When it returns, the last results may still be on their way to the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeAlias

from unisono.errors import CollectiveTimeoutError, UnisonoError
from unisono.foundation.deadlines import Deadline
from unisono.transports.contracts.call import AnyArray
from unisono.transports.cuda.device import Device, Event, Stream, is_over

# The pause between two looks at an event grows from the first value to the second.
_SHORT_LOOK_S, _LONG_LOOK_S = 5e-6, 500e-6
# After the loss of a rank, the device gets this time to finish the work of the call.
_GRACE_S = 0.1

# Device memory: the address of the first byte, and the size. Address 0 means none, and nothing is copied.
Piece: TypeAlias = tuple[int, int]


class StagedPart(NamedTuple):
    """A part of a call.

    Attributes:
        reads, writes: the memory to copy from and to the device. On the host the pieces lie one after the other.
        exchange: ``exchange(source, target)`` does the exchange on the host, with bytes; it may block.
    """

    reads: Sequence[Piece]
    writes: Sequence[Piece]
    exchange: Callable[[AnyArray, AnyArray], None]


class Staging:
    """The slots of one device, and the streams of their copies. Used by one thread at a time.

    Attributes:
        to_host_nbytes, to_device_nbytes: the bytes copied so far.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._down, self._up = device.new_stream(), device.new_stream()
        self._slots = (_Slot(device), _Slot(device))
        self.to_host_nbytes = self.to_device_nbytes = 0

    def run(self, parts: Sequence[StagedPart], ready: Sequence[Event], finished: Event, deadline: Deadline) -> None:
        """Carry out the parts of a call one after the other.

        Args:
            parts: no part writes memory that a later one reads.
            ready: recorded events; all copies run after them.
            finished: recorded after all that this call has issued, also in case of an error.
            deadline: when to give up.

        Raises:
            CollectiveTimeoutError: the device has not copied a part by then.
            Any error of `exchange`.
        """
        # This orders copies to the device too: each is issued after a copy to the host has been seen to end.
        for event in ready:
            self._device.wait(self._down, event)
        try:
            self._fetch(0, parts)
            for index, part in enumerate(parts):
                self._fetch(index + 1, parts)
                self._pass_on(part, self._slots[index % 2], deadline)
        except BaseException:
            for slot in self._slots:  # copies to the host may still be under way
                self._device.wait(self._up, slot.fetched)
            raise
        finally:
            self._device.record(finished, self._up)

    def close(self, deadline: Deadline) -> None:
        """Free everything once the device has done all issued work; at the deadline, free only what is idle."""
        for slot in self._slots:
            for event in (slot.fetched, slot.stored):
                with suppress(UnisonoError):
                    await_event(self._device, event, deadline)
                if not is_over(self._device, event):
                    return  # leaks the rest, because memory in use by a copy may not be freed
            slot.close()
        for stream in (self._down, self._up):
            self._device.end_stream(stream)

    def _pass_on(self, part: StagedPart, slot: _Slot, deadline: Deadline) -> None:
        """Exchange a part once it has arrived on the host, and issue the copies of the result."""
        await_event(self._device, slot.fetched, deadline)
        await_event(self._device, slot.stored, deadline)  # the result of the part before last has left the slot
        target = slot.target.of(_nbytes(part.writes))
        part.exchange(slot.source.of(_nbytes(part.reads)), target)
        self.to_device_nbytes += target.nbytes
        self._copy(part.writes, target, self._up, to_host=False)
        self._device.record(slot.stored, self._up)

    def _fetch(self, index: int, parts: Sequence[StagedPart]) -> None:
        """Issue the copies of part `index` to the host, if there is one."""
        if index >= len(parts):
            return
        part, slot = parts[index], self._slots[index % 2]
        source = slot.source.of(_nbytes(part.reads))
        self.to_host_nbytes += source.nbytes
        self._copy(part.reads, source, self._down, to_host=True)
        self._device.record(slot.fetched, self._down)

    def _copy(self, pieces: Sequence[Piece], host: AnyArray, stream: Stream, *, to_host: bool) -> None:
        address = host.ctypes.data
        for pointer, nbytes in pieces:
            if pointer and nbytes:
                dst, src = (address, pointer) if to_host else (pointer, address)
                self._device.copy(dst, src, nbytes, stream)
            address += nbytes


class Pinned:
    """Pinned host memory that grows on demand."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._array: AnyArray | None = None

    def holds(self, nbytes: int) -> bool:
        """Return whether `of` would return the memory that it has."""
        return not nbytes or (self._array is not None and self._array.nbytes >= nbytes)

    def of(self, nbytes: int) -> AnyArray:
        """Return `nbytes` as uint8. Old content may be lost, so no copy of it may be under way."""
        if self._array is None or self._array.nbytes < nbytes:
            self.close()
            self._array = self._device.pin(max(1, nbytes))
        return self._array[:nbytes]

    def close(self) -> None:
        """Free the memory."""
        if self._array is not None:
            self._device.unpin(self._array)
        self._array = None


class _Slot:
    """Memory for one part, with the events of its arrival on the host and of the departure of its result."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.source, self.target = Pinned(device), Pinned(device)
        self.fetched, self.stored = device.new_event(), device.new_event()

    def close(self) -> None:
        self.source.close()
        self.target.close()
        for event in (self.fetched, self.stored):
            self._device.end_event(event)


def await_event(
    device: Device,
    event: Event,
    deadline: Deadline,
    check: Callable[[], None] = lambda: None,
    is_intact: Callable[[], bool] = lambda: True,
) -> None:
    """Block until the last record of an event has happened.

    Args:
        device: the device.
        event: the event.
        deadline: when to give up.
        check: raises the error of another rank, if there is one.
        is_intact: returns whether an event that has happened means that the work before it has its results.

    Raises:
        CollectiveTimeoutError: it has not happened by the deadline.
        Any error of `check`, unless the event happens soon after and the work is intact: work that depends on a lost
            rank may never end.
    """
    pause_s, lost = _SHORT_LOOK_S, None
    while not device.done(event):
        if lost is None:
            try:
                check()
            except UnisonoError as error:
                lost, deadline = error, Deadline(min(deadline.remaining_s(), _GRACE_S))
        if deadline.has_passed():
            late = CollectiveTimeoutError(f"{device.name} has not finished its earlier work in time")
            raise lost or late
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONG_LOOK_S)
    if not is_intact():
        if lost is not None:
            raise lost
        check()


def _nbytes(pieces: Sequence[Piece]) -> int:
    return sum(nbytes for _, nbytes in pieces)
