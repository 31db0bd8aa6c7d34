"""The state that device doubles of several processes share: memory and events, each in a memfd.

Other processes open the memfds through ``/proc``. They have no names, so nothing remains when a process is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import select
from collections.abc import Iterator

import numpy as np

from unisono.testing.device_clocks import AccessHistory, Clock, Words, load_clock, store_clock
from unisono.transports.cuda.memory.host import HostMemory, MemoryHandle

_FACTS_NBYTES = 1 << 16
_MOST_OPENERS = 64
_FREED, _OPENERS = 0, 1
_HISTORY = 1 + _MOST_OPENERS

_SLOT_WORDS = 2048
_SLOTS = 1024
_ISSUED, _HAPPENED, _ENDED, _LATE, _CLOCK = 0, 1, 2, 3, 4

# A flag has its number, the count of its raises, and whether it was released. The clocks of the last raises follow,
# each behind the number of that raise.
_NUMBER, _RAISED, _RELEASED, _FLAG_CLOCKS = 0, 1, 2, 3
_RAISES, _RAISE_WORDS = 8, 512
_FLAG_WORDS = _FLAG_CLOCKS + _RAISES * _RAISE_WORDS
_CYCLE = 1 << 64


class DeviceSegment:
    """Memory of one device double, mapped by one process: its bytes, followed by facts that all processes share."""

    def __init__(self, mapped: HostMemory, nbytes: int) -> None:
        self._mapped = mapped
        self.nbytes = nbytes
        self.address = mapped.address
        facts = _words(mapped, _page_up(nbytes), _FACTS_NBYTES // 8)
        self._facts = facts
        self._history = AccessHistory(facts[_HISTORY:])

    @classmethod
    def new(cls, nbytes: int) -> DeviceSegment:
        """Return new memory with arbitrary content."""
        segment = cls(HostMemory.new(_page_up(nbytes) + _FACTS_NBYTES), nbytes)
        ctypes.memset(segment.address, 0xA5, min(nbytes, 1 << 16))
        return segment

    @classmethod
    def opened(cls, handle: MemoryHandle) -> DeviceSegment:
        """Return memory that another process exported, and note in it that this process has it open."""
        segment = cls(HostMemory.opened(handle), handle.number)
        with segment.locked():
            openers = segment._facts[_OPENERS:_HISTORY]
            free = next(at for at, process in enumerate(openers.tolist()) if not process or has_ended(process))
            openers[free] = os.getpid()
        return segment

    def handle(self) -> MemoryHandle:
        """Return the handle by which other processes open it."""
        return self._mapped.handle(self.nbytes)

    def history(self) -> AccessHistory:
        """Return the accesses to the segment; use them only while it is `locked`."""
        return self._history

    def openers(self) -> list[int]:
        """Return the living processes that have the segment open."""
        return [process for process in self._facts[_OPENERS:_HISTORY].tolist() if process and not has_ended(process)]

    def is_freed(self) -> bool:
        """Return whether the owner has freed the segment."""
        return bool(self._facts[_FREED])

    def free(self) -> None:
        """Free the segment. Processes that still have it open read other bytes from now on, which shows their error."""
        self._mapped.empty()
        self._facts[_FREED] = 1
        ctypes.memset(self.address, 0xDB, min(self.nbytes, mmap.PAGESIZE))
        self._mapped.close()

    def close(self) -> None:
        """Close memory of another process."""
        openers = self._facts[_OPENERS:_HISTORY]
        with self.locked():
            openers[openers == os.getpid()] = 0
        self._mapped.close()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the history and the openers against other processes. The lock of a killed process is released."""
        fcntl.lockf(self._mapped.descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._mapped.descriptor, fcntl.LOCK_UN)


class EventState:
    """An event in a page of the process that created it: the numbers of its records that were issued and happened."""

    def __init__(self, page: EventPage, index: int, *, ends_with_owner: bool = True) -> None:
        self._page = page
        self._ends_with_owner = ends_with_owner
        self.index = index
        self._words = page.slot(index)

    @property
    def issued(self) -> int:
        """The number of records that have been issued."""
        return int(self._words[_ISSUED])

    @property
    def is_ended(self) -> bool:
        """Whether the process that created the event has released it."""
        return bool(self._words[_ENDED])

    @property
    def clock(self) -> Clock:
        """The clock of the stream at the last issued record."""
        return load_clock(self._words[_CLOCK:])

    def is_late(self, number: int) -> bool:
        """Return whether the clock of record `number` is known only when that record has happened."""
        return int(self._words[_LATE]) == number and not self.has_happened(number)

    def issue(self, *, is_late: bool) -> int:
        """Issue an event record and return its number. Its clock follows by `keep_clock`, if `is_late` when it runs."""
        self._words[_ISSUED] += 1
        if is_late:
            self._words[_LATE] = self.issued
        return self.issued

    def keep_clock(self, clock: Clock) -> None:
        """Store the vector clock of the recording stream at the last record."""
        store_clock(self._words[_CLOCK:], clock)

    def happen(self, number: int) -> None:
        """Note that record `number` of this event has happened: its stream has reached it."""
        self._words[_HAPPENED] = max(int(self._words[_HAPPENED]), number)

    def has_happened(self, number: int) -> bool:
        """Return whether a record has happened, or its process has ended where that counts as well."""
        return int(self._words[_HAPPENED]) >= number or (self._ends_with_owner and self._page.has_owner_ended())

    def end(self) -> None:
        """Release the event, whose place in the page other events may take then."""
        self._words[_ENDED] = 1
        self._page.give_back(self.index)


class EventPage:
    """The events of one process, mapped by that process or another."""

    def __init__(self, mapped: HostMemory, owner: int) -> None:
        self._mapped = mapped
        self._owner = owner
        self._unused = list(range(_SLOTS))

    @classmethod
    def new(cls) -> EventPage:
        """Return a page for the events of this process."""
        return cls(HostMemory.new(_SLOTS * _SLOT_WORDS * 8), os.getpid())

    @classmethod
    def opened(cls, handle: MemoryHandle) -> EventPage:
        """Return the page of another process."""
        return cls(HostMemory.opened(handle), handle.process)

    def new_event(self) -> EventState:
        """Return an event that has not been recorded."""
        index = self._unused.pop(0)
        self.slot(index)[:] = 0
        return EventState(self, index)

    def give_back(self, index: int) -> None:
        """Make an event available again, but use all other free events before it."""
        self._unused.append(index)

    def handle(self, index: int) -> MemoryHandle:
        """Return the handle by which other processes open an event."""
        return self._mapped.handle(index)

    def slot(self, index: int) -> Words:
        """Return the words of an event."""
        return _words(self._mapped, index * _SLOT_WORDS * 8, _SLOT_WORDS)

    def has_owner_ended(self) -> bool:
        """Return whether the process that created the events has ended."""
        return self._owner != os.getpid() and has_ended(self._owner)

    def close(self) -> None:
        """Unmap the page."""
        self._mapped.close()


class FlagPage:
    """Flags of one process, mapped by that process or another.

    Each flag keeps the vector clocks of its last raises: which work of each stream came before the raise.
    """

    def __init__(self, mapped: HostMemory, count: int, is_own: bool) -> None:
        self._mapped = mapped
        self.count = count
        self.is_own = is_own
        self.address = mapped.address

    @classmethod
    def new(cls, count: int) -> FlagPage:
        """Return new flags of this process."""
        return cls(HostMemory.new(_page_up(count * _FLAG_WORDS * 8)), count, True)

    @classmethod
    def opened(cls, handle: MemoryHandle) -> FlagPage:
        """Return flags of any process."""
        return cls(HostMemory.opened(handle), handle.number, False)

    def handle(self) -> MemoryHandle:
        """Return the handle by which processes open the flags."""
        return self._mapped.handle(self.count)

    def number(self, index: int) -> int:
        """Return the number of a flag."""
        return int(self._words(index)[_NUMBER]) % _CYCLE

    def is_reached(self, index: int, number: int) -> bool:
        """Return whether a flag is at least `number`, compared cyclically."""
        return (self.number(index) - number) % _CYCLE < _CYCLE // 2

    def is_released(self, index: int) -> bool:
        """Return whether the host has ever released a flag."""
        return bool(self._words(index)[_RELEASED])

    def set(self, index: int, number: int, clock: Clock) -> None:
        """Set a flag, by a stream with this clock."""
        words = self._words(index)
        raised = self._raise(index, int(words[_RAISED]))
        store_clock(raised[1:], clock)
        raised[0] = _signed(number)
        words[_RAISED] += 1
        words[_NUMBER] = _signed(number)

    def clock(self, index: int, number: int) -> Clock:
        """Return the clock of the raise to `number`; an empty one if it is not known any more."""
        count = int(self._words(index)[_RAISED])
        last = (self._raise(index, at) for at in range(count - 1, max(-1, count - 1 - _RAISES), -1))
        return next((load_clock(raised[1:]) for raised in last if int(raised[0]) == _signed(number)), {})

    def release(self, number: int) -> None:
        """Set all flags to a number, by the host."""
        for index in range(self.count):
            self._words(index)[_RELEASED] = 1
            self._words(index)[_NUMBER] = _signed(number)

    def close(self) -> None:
        """Unmap the flags."""
        self._mapped.close()

    def _words(self, index: int) -> Words:
        return _words(self._mapped, index * _FLAG_WORDS * 8, _FLAG_WORDS)

    def _raise(self, index: int, count: int) -> Words:
        start = _FLAG_CLOCKS + count % _RAISES * _RAISE_WORDS
        return self._words(index)[start : start + _RAISE_WORDS]


def has_ended(process: int) -> bool:
    """Return whether a process has ended, even if its parent has not waited for it yet."""
    if process == os.getpid():
        return False
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(0))
    finally:
        os.close(descriptor)


def _signed(number: int) -> int:
    """Return a number of 64 bits as words store it."""
    return (number + _CYCLE // 2) % _CYCLE - _CYCLE // 2


def _page_up(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _words(memory: HostMemory, start: int, count: int) -> Words:
    """Return `count` words of 64 bits from byte `start` on."""
    return np.frombuffer(memory.view, np.int64, count, start)
