"""The state of a `Gpu`: its memory, streams and events, and the rules for their use.

A caller must hold `GpuState.lock`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from unisono.errors import TransportUnavailableError
from unisono.testing.device_clocks import Access, AccessHistory, Clock, join
from unisono.testing.device_segments import DeviceSegment, EventPage, EventState, FlagPage
from unisono.testing.device_streams import StreamSchedule, StreamState, StreamWork
from unisono.transports.contracts.call import AnyArray
from unisono.transports.cuda.device import (
    LEGACY_STREAM,
    THREAD_STREAM,
    Allocation,
    DeviceGraph,
    Event,
    Flags,
    PointerFacts,
    Stream,
)
from unisono.transports.cuda.issued_calls import IssuedCall
from unisono.transports.cuda.memory.host import MemoryHandle

LENIENCIES = {
    "eager": "work is done when it is issued",
    "in_order": "streams wait for each other as if they were one",
    "waits_for_future": "a wait for an event that was not recorded waits for its first record",
    "opens_own": "a handle opens in the process that exported it",
    "opens_twice": "a handle opens again while it is open",
    "uses_freed": "memory may be used after it was freed or closed",
    "frees_opened": "memory may be freed while other processes have it open",
    "releases_at_once": "memory of other processes is closed before the call returns",
    "flags_fall": "a flag may be set to a number that is not above its number",
    "frees_pending": "memory may be freed or closed, and streams ended, while work is under way",
    "overlaps": "the inputs and the output of one call may overlap",
    "misaligned": "elements may have any address",
    "races": "accesses need no order",
    "captures": "a stream that records a graph may be used",
    "uses_ended": "events may be used after they were given back",
    "aborted": "work may be issued after an abort",
    "exports_any": "memory that was not allocated on its own may be exported",
    "exports_unshared": "an event that was not created as shared may be exported",
}

_PINNED_HISTORY_WORDS = 4096
_GRAVES = 32
# The stream on which memory is given, and the one of `lasting_stream`.
SIDE_STREAM, LASTING_STREAM = Stream(-1), Stream(-2)
LASTING = (LEGACY_STREAM, THREAD_STREAM, SIDE_STREAM, LASTING_STREAM)


class DeviceTrapError(AssertionError):
    """A rule of devices was broken."""


@dataclass(slots=True)
class _Region:
    """A range of addresses that the device knows. `handle` is the handle by which it was opened, if it was."""

    address: int
    nbytes: int
    kind: str
    segment: DeviceSegment | None
    handle: bytes | None
    history: AccessHistory
    array: AnyArray | None = None
    is_gone: bool = False

    def locked(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.segment is None or self.is_gone else self.segment.locked()


class GpuState:
    """A GPU as this process uses it; see `Gpu` for the arguments."""

    def __init__(
        self,
        seed: int = 0,
        lenient: Collection[str] = (),
        background: bool = True,
        uuid: str = "double-0",
        reaches: Collection[str] = (),
        exports: bool = True,
        gives_up: bool = True,
        flags: bool = True,
        pool: bool = True,
        graphs: bool = True,
    ) -> None:
        if unknown := set(lenient) - set(LENIENCIES):
            raise ValueError(f"there are no such leniencies: {', '.join(unknown)}")
        self.uuid, self.reaches, self.exports = uuid, frozenset(reaches), exports
        self._gives_up = gives_up
        self.has_flags = flags
        self.has_pool = pool
        self.has_graphs = flags and graphs
        self._flags: dict[int, FlagPage] = {}
        self._graphs: dict[int, Sequence[IssuedCall]] = {}
        self.lock = threading.RLock()
        self.is_lost = False
        self._lenient = frozenset(lenient)
        self._handles = itertools.count(16)
        self._numbers = itertools.count()
        self._regions: dict[int, _Region] = {}
        self._gone: deque[int] = deque()
        self._closing: deque[DeviceSegment] = deque()
        self._events: dict[int, EventState] = {}
        self._opened_events: set[int] = set()
        self._shared_events: set[int] = set()
        self._streams: dict[tuple[int, int], StreamState] = {}
        self._page = EventPage.new()
        self._pages: dict[MemoryHandle, EventPage] = {}
        self._host: Clock = {}
        self._trap: AssertionError | None = None
        self._schedule = StreamSchedule(self.lock, seed, self.allows("in_order"), self._keep_trap)
        self._background = background
        if background:
            self._schedule.start_thread()

    def allows(self, leniency: str) -> bool:
        """Return whether a rule is switched off."""
        return leniency in self._lenient

    def rule(self, leniency: str, holds: bool, broken: str) -> None:
        """Raise a trap unless a rule holds or is switched off."""
        if not holds and leniency not in self._lenient:
            raise DeviceTrapError(broken)

    def check(self) -> None:
        """Raise the trap of work that ran in the background."""
        trap, self._trap = self._trap, None
        if trap is not None:
            raise trap

    def require_context(self) -> None:
        """Raise the error of a device whose context has ended."""
        if self.is_lost:
            raise TransportUnavailableError("the context of the device has ended: start a new process")

    def allocate(self, nbytes: int) -> Allocation:
        """Return new memory of its own."""
        return self._add(DeviceSegment.new(-(-max(nbytes, 1) // 512) * 512), "dedicated")

    def take(self, nbytes: int, stream: Stream) -> Allocation:
        """Return memory of the pool. Work that is not ordered behind `stream` races with the taking."""
        if not self.has_pool:
            raise DeviceTrapError("the device has no pool")
        allocation = self._add(DeviceSegment.new(max(nbytes, 1)), "pooled")
        self.use(stream, [], (allocation.pointer, allocation.nbytes), lambda: None)
        return allocation

    def give(self, allocation: Allocation, events: Collection[Event] | None) -> None:
        """Free memory when `events` have happened, or when all present work of this process is done.

        Freeing counts as an access, so it conflicts with work that is not ordered before it.
        """
        region = self._owned(allocation)
        region.is_gone = True
        self._bury(allocation.pointer)
        assert region.segment is not None
        openers = region.segment.openers()
        self.rule("frees_opened", not openers, f"memory is freed while processes {openers} have it open")
        side, host = self.stream(SIDE_STREAM), dict(self._host)
        states = [self.event(event) for event in events or ()]
        bounds = [state.issued for state in states]
        streams = list(self._streams.values()) if events is None else []
        before = [work for stream in streams for work in stream.queue]

        def order() -> None:
            for clock in (host, *(state.clock for state in states), *(stream.clock for stream in streams)):
                join(side.clock, clock)
            self._check_order(side, region, (allocation.pointer, allocation.nbytes), True)

        def is_ready() -> bool:
            pending = any(work is earlier for stream in streams for work in stream.queue for earlier in before)
            return not pending and all(map(EventState.has_happened, states, bounds))

        self.issue(
            SIDE_STREAM,
            region.segment.free,
            order,
            is_ready,
            is_late=any(stream.is_deferred() for stream in streams) or any(map(EventState.is_late, states, bounds)),
        )
        for event in events or ():
            self.end_event(event)

    def pin(self, nbytes: int) -> AnyArray:
        """Return host memory that the device can use."""
        array = np.full(max(nbytes, 1), 0xA5, np.uint8)
        history = AccessHistory(np.zeros(_PINNED_HISTORY_WORDS, np.int64))
        region = _Region(array.ctypes.data, array.size, "pinned", None, None, history, array)
        self._regions[region.address] = region
        return array[:nbytes]

    def open(self, data: bytes) -> Allocation:
        """Return memory of another process."""
        handle = MemoryHandle.unpack(data)
        if handle.process == os.getpid():
            if not self.allows("opens_own"):
                raise TransportUnavailableError("the handle is of this process, which has the memory already")
            return self._add(DeviceSegment.opened(handle), "opened", data)
        is_open = any(region.handle == data and not region.is_gone for region in self._regions.values())
        self.rule("opens_twice", not is_open, "the handle is open already")
        return self._add(DeviceSegment.opened(handle), "opened", data)

    def export(self, allocation: Allocation) -> bytes:
        """Return the handle of memory."""
        region = self._owned(allocation)
        self.rule("exports_any", region.kind == "dedicated", f"{region.kind} memory was exported")
        assert region.segment is not None
        return region.segment.handle().pack()

    def release(self, address: int, kinds: tuple[str, ...]) -> None:
        """Free, close or unpin memory."""
        region = self._regions.get(address)
        if region is None or region.is_gone or region.kind not in kinds:
            raise DeviceTrapError(f"there is no {' or '.join(kinds)} memory at {address:#x} to give back")
        pending = any(address in work.touches for work in self._schedule.pending())
        self.rule("frees_pending", not pending, "memory is given back while work on it is under way")
        region.is_gone = True
        self._bury(address)
        if region.segment is None:
            return
        if region.kind == "opened":
            self._closing.append(region.segment)
            if self.allows("releases_at_once"):
                self._close_next()
            return
        openers = region.segment.openers()
        self.rule("frees_opened", not openers, f"memory is freed while processes {openers} have it open")
        region.segment.free()

    def has_released(self) -> bool:
        """Return whether all memory has been released, after releasing a little, unless a stream has work to do."""
        if self.is_lost:
            return True
        if self._closing and not self._schedule.pending():
            self._close_next()
        return not self._closing

    def release_all(self) -> None:
        """Free the memory that was released, but that the double had not freed yet."""
        while self._closing:
            self._close_next()

    def _close_next(self) -> None:
        self._closing.popleft().close()

    def _bury(self, address: int) -> None:
        """Reserve released addresses for a while, so that a late access to them is noticed."""
        self._gone.append(address)
        if len(self._gone) > _GRAVES:
            del self._regions[self._gone.popleft()]

    def facts(self, pointer: int, ordinal: int) -> PointerFacts:
        """Return the facts about an address."""
        for region in self._regions.values():
            if region.address <= pointer < region.address + region.nbytes and not region.is_gone:
                whole = Allocation(region.address, region.nbytes)
                kind = {"dedicated": "device", "opened": "device"}.get(region.kind, region.kind)
                return PointerFacts(kind, -1 if kind == "pinned" else ordinal, whole)
        return PointerFacts("host", -1, Allocation(pointer, 0))

    def new_stream(self) -> Stream:
        """Return a new stream."""
        handle = Stream(next(self._handles))
        self._streams[handle, 0] = self._new_stream()
        return handle

    def end_stream(self, stream: Stream) -> None:
        """Release a stream."""
        state = self.stream(stream)
        self.rule("frees_pending", not state.queue, "a stream is ended while its work is under way")
        del self._streams[stream, 0]
        self._schedule.streams.remove(state)

    def stream(self, stream: Stream) -> StreamState:
        """Return the state of a stream; the default streams always exist."""
        place = stream, threading.get_ident() if stream == THREAD_STREAM else 0
        if place not in self._streams:
            if stream not in LASTING:
                raise DeviceTrapError(f"there is no stream {stream}")
            self._streams[place] = self._new_stream()
        return self._streams[place]

    def new_event(self, shared: bool) -> Event:
        """Return a new event."""
        event = self._add_event(self._page.new_event())
        if shared:
            self._shared_events.add(event.handle)
        return event

    def export_event(self, event: Event) -> bytes:
        """Return the handle of an event of this process."""
        if event.handle in self._opened_events:
            raise DeviceTrapError("an event of another process was exported")
        self.rule("exports_unshared", event.handle in self._shared_events, "the event was not made to be shared")
        return self._page.handle(self.event(event).index).pack()

    def open_event(self, data: bytes) -> Event:
        """Return an event of another process."""
        handle = MemoryHandle.unpack(data)
        if handle.process == os.getpid():
            raise TransportUnavailableError("the event is of this process, which has it already")
        of_page = handle._replace(number=0)
        if of_page not in self._pages:
            self._pages[of_page] = EventPage.opened(handle)
        page = self._pages[of_page]
        event = self._add_event(EventState(page, handle.number, ends_with_owner=self._gives_up))
        self._opened_events.add(event.handle)
        return event

    def end_event(self, event: Event) -> None:
        """Release an event."""
        state = self.event(event)
        del self._events[event.handle]
        self._shared_events.discard(event.handle)
        if event.handle in self._opened_events:
            self._opened_events.discard(event.handle)
        else:
            state.end()

    def event(self, event: Event) -> EventState:
        """Return the state of an event."""
        state = self._events.get(event.handle)
        if state is None:
            raise DeviceTrapError("there is no such event, or it has been given back")
        self.rule("uses_ended", not state.is_ended, "the event was given back by the process that made it")
        return state

    def issue(
        self,
        stream: Stream,
        run: Callable[[], None],
        order: Callable[[], None],
        is_ready: Callable[[], bool] = lambda: True,
        touches: frozenset[int] = frozenset(),
        is_late: bool = False,
    ) -> None:
        """Put work into the queue of a stream.

        ``order()`` updates the clock of the stream, and checks accesses. It is called now, unless the work, or earlier
        work of the stream, is late: its place in the order is known only when it runs.
        """
        state = self.stream(stream)
        self.rule("captures", not state.is_capturing, "a stream that records a graph was used")
        is_deferred = is_late or state.is_deferred()
        if not is_deferred:
            order()

        def run_deferred() -> None:
            order()
            run()

        state.queue.append(
            StreamWork(run_deferred if is_deferred else run, is_ready, touches, next(self._numbers), is_deferred)
        )
        if self.allows("eager"):
            while self._schedule.step():
                pass
        self._schedule.issued()

    def record(self, event: Event, stream: Stream) -> None:
        """Issue a record of an event."""
        state, on, host = self.event(event), self.stream(stream), dict(self._host)
        number = state.issue(is_late=on.is_deferred())

        def order() -> None:
            join(on.clock, host)
            state.keep_clock(on.clock)

        self.issue(stream, lambda: state.happen(number), order)

    def wait(self, stream: Stream, event: Event) -> None:
        """Issue a wait for the last issued record of an event."""
        state, on = self.event(event), self.stream(stream)
        bound = state.issued
        is_bound = bound > 0
        if not is_bound and self.allows("waits_for_future"):
            bound = 1

        def order() -> None:
            if is_bound:
                join(on.clock, state.clock)

        is_late = is_bound and state.is_late(bound)
        self.issue(stream, lambda: None, order, lambda: state.has_happened(bound), is_late=is_late)

    # Flags.

    def new_flags(self, count: int) -> Flags:
        """Return new flags of this process."""
        return self._add_flags(FlagPage.new(count))

    def open_flags(self, data: bytes) -> Flags:
        """Return flags of any process."""
        return self._add_flags(FlagPage.opened(MemoryHandle.unpack(data)))

    def end_flags(self, flags: Flags) -> None:
        """Release flags."""
        page = self.flag_page(flags)
        pending = any(page.address in work.touches for work in self._schedule.pending())
        self.rule("frees_pending", not pending, "flags are given back while work on them is under way")
        del self._flags[flags.address]
        page.close()

    def flag_page(self, flags: Flags) -> FlagPage:
        """Return the memory of flags."""
        if flags.address not in self._flags:
            raise DeviceTrapError("there are no such flags, or they have been given back")
        return self._flags[flags.address]

    def raise_flag(self, flags: Flags, index: int, number: int, stream: Stream) -> None:
        """Issue a raise of a flag."""
        page, on, host, clock = self.flag_page(flags), self.stream(stream), dict(self._host), dict[int, int]()

        def order() -> None:
            join(on.clock, host)
            clock.update(on.clock)

        def run() -> None:
            rises = number != page.number(index) and not page.is_reached(index, number)
            self.rule(
                "flags_fall", rises or page.is_released(index), f"a flag is set from {page.number(index)} to {number}"
            )
            page.set(index, number, clock)

        self.issue(stream, run, order, touches=frozenset({page.address}))

    def await_flag(self, flags: Flags, index: int, number: int, stream: Stream) -> None:
        """Issue a wait for a flag."""
        page, on = self.flag_page(flags), self.stream(stream)
        if not page.is_own:
            raise DeviceTrapError("a stream waits for a flag of another process, which nobody could release")

        def order() -> None:
            if page.is_released(index):
                on.is_released = True
            join(on.clock, page.clock(index, number))

        self.issue(
            stream,
            lambda: None,
            order,
            lambda: page.is_reached(index, number),
            frozenset({page.address}),
            is_late=True,
        )

    # Graphs.

    def new_graph(self, calls: Sequence[IssuedCall]) -> DeviceGraph:
        """Return a new graph of calls of a device."""
        graph = DeviceGraph(next(self._handles))
        self._graphs[graph.handle] = tuple(calls)
        return graph

    def graph(self, graph: DeviceGraph) -> Sequence[IssuedCall]:
        """Return the calls of a graph."""
        if graph.handle not in self._graphs:
            raise DeviceTrapError("there is no such graph, or it has been given back")
        return self._graphs[graph.handle]

    def end_graph(self, graph: DeviceGraph) -> None:
        """Release a graph."""
        self.graph(graph)
        del self._graphs[graph.handle]

    def _add_flags(self, page: FlagPage) -> Flags:
        self._flags[page.address] = page
        return Flags(page.address, page.count)

    def done(self, event: Event) -> bool:
        """Return whether an event has happened, after running a little of the late work."""
        self.require_context()
        self._schedule.run_some()
        self.check()
        state = self.event(event)
        is_done = state.has_happened(state.issued)
        if is_done:
            join(self._host, state.clock)
        return is_done

    def use(
        self, stream: Stream, reads: Sequence[tuple[int, int]], writes: tuple[int, int], run: Callable[[], None]
    ) -> None:
        """Issue work that reads and writes memory; each range is (address, bytes)."""
        self._check_overlaps(reads, writes)
        self.use_all(stream, reads, [writes], run)

    def use_all(
        self,
        stream: Stream,
        reads: Sequence[tuple[int, int]],
        writes: Sequence[tuple[int, int]],
        run: Callable[[], None],
    ) -> None:
        """Issue work that may write several ranges. The caller has checked that they do not overlap."""
        on, host = self.stream(stream), dict(self._host)
        regions = {place: self._region(*place) for place in (*reads, *writes)}

        def order() -> None:
            join(on.clock, host)
            for place, region in regions.items():
                self._check_order(on, region, place, place in writes)

        self.issue(stream, run, order, touches=frozenset(region.address for region in regions.values()))

    def _check_overlaps(self, reads: Sequence[tuple[int, int]], writes: tuple[int, int]) -> None:
        start, nbytes = writes
        for other, other_nbytes in reads:
            apart = start + nbytes <= other or other + other_nbytes <= start
            self.rule("overlaps", apart or other == start, "an input and the output overlap")

    def _check_order(self, on: StreamState, region: _Region, place: tuple[int, int], writes: bool) -> None:
        if on.is_released:
            return
        start = place[0] - region.address
        on.clock[on.stream] = on.clock.get(on.stream, 0) + 1
        access = Access(on.stream, on.clock[on.stream], start, start + place[1], int(writes))
        with region.locked():
            other = region.history.add(access, on.clock)
        action = "writes" if writes else "reads"
        self.rule(
            "races",
            other is None,
            f"process {os.getpid()} {action} bytes {start} to {start + place[1]} of {region.kind} memory without being "
            f"ordered behind {other}",
        )

    def _region(self, pointer: int, nbytes: int) -> _Region:
        for region in self._regions.values():
            if region.address <= pointer and pointer + nbytes <= region.address + region.nbytes:
                is_freed = region.is_gone or (region.segment is not None and region.segment.is_freed())
                self.rule("uses_freed", not is_freed, "memory is used that has been freed or closed")
                return region
        raise DeviceTrapError(f"{nbytes} bytes at {pointer:#x} are not memory of the device")

    def _owned(self, allocation: Allocation) -> _Region:
        region = self._regions.get(allocation.pointer)
        if region is None or region.is_gone or region.kind == "opened":
            raise DeviceTrapError("this is not memory of this process")
        return region

    def _add(self, segment: DeviceSegment, kind: str, handle: bytes | None = None) -> Allocation:
        self._regions[segment.address] = _Region(
            segment.address, segment.nbytes, kind, segment, handle, segment.history()
        )
        return Allocation(segment.address, segment.nbytes)

    def _add_event(self, state: EventState) -> Event:
        event = Event(next(self._handles))
        self._events[event.handle] = state
        return event

    def _new_stream(self) -> StreamState:
        state = StreamState(random.SystemRandom().getrandbits(62))
        self._schedule.streams.append(state)
        return state

    def _keep_trap(self, trap: AssertionError) -> None:
        self._trap = self._trap or trap
