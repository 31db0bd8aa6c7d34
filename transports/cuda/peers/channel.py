"""A channel between the devices of some ranks: a slab of memory of each rank, and signals that order their streams.

Theory of operation
-------------------
There are two kinds of signals. All ranks of a channel use the same one.

*Flags.* To *signal*, a rank lets its stream raise a flag in memory of the peer. To *follow* a signal, the peer lets its
own stream wait until the flag has the signal's number. Both are issued at once, so the host waits for nobody. If a rank
dies, its flags stay as they are. Then the others release their own flags, and their streams go on.

*Events*, for devices without flags, and for ranks that share a process. To *signal*, a rank records an event on a
stream and then publishes in host memory that it has been recorded. To *follow* a signal, the peer sees that on the host
and then makes a stream wait for the event. So a wait is issued only after its record, and no stream waits for work that
may never come.

Each rank has a ring of events. A wait binds to the record issued last. So the rank records an event again only after
all peers that were told of its last record have acknowledged that their waits are issued.

Ranks of one process share a context, in which handles do not open. They use each other's addresses and events.

Slabs grow at the same calls on all ranks. So all ranks have had the same number of slabs when they run a call, and
this number, the *generation*, says which slab of a peer is meant. A peer that is ahead may show one more.

A larger slab replaces the one before. A rank *leaves* the earlier slabs of all ranks when its work that uses them is
over, and it has closed those of the others. It frees its own when all ranks have left them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.errors import InternalError
from unisono.transports.cuda.device import ALLOCATION_NBYTES, Allocation, Device, Event, Flags, Stream, is_over
from unisono.transports.cuda.issued_calls import Counters, NextNumber
from unisono.transports.cuda.peers.peer_board import RING, Board, Slab


class Channel:
    """One channel of a group of ranks, as one of them uses it. One call at a time may use it.

    Args:
        number: the index of the channel.
        rank: this rank.
        boards: the boards of all ranks.
        local: whether each rank is in this process.
        device: this rank's device.
        by_flags: whether signals are flags; the same on all ranks.

    Attributes:
        last: happens when this rank's last use of the channel is over.
        by_flags: the argument.
        generation: the number of slabs that this rank has had so far.
    """

    def __init__(
        self,
        number: int,
        rank: int,
        boards: Sequence[Board],
        local: Sequence[bool],
        device: Device,
        by_flags: bool,
    ) -> None:
        size = len(boards)
        self._number = number
        self._rank = rank
        self._boards = boards
        self._mine = boards[rank]
        self._local = local
        self._device = device
        self.last = device.new_event()
        self.by_flags = by_flags
        self._flags = device.new_flags(size) if by_flags else None  # by the rank that raises them
        self._peer_flags: list[Flags | None] = [None] * size
        self._events = [] if by_flags else [device.new_event(shared=True) for _ in range(RING)]
        self._peer_events: list[Sequence[Event]] = [()] * size
        self._recorded = 0
        self._announced: list[list[tuple[int, int]]] = [[] for _ in range(RING)]  # peers and their signals, by event
        self._signalled, self._followed = [0] * size, [0] * size
        self._raised, self._awaited = Counters(size), Counters(size)
        self.generation = 0
        self._slabs: dict[int, Allocation] = {}  # by generation; peers may still use earlier ones than the last
        self._grown = device.new_event()  # behind the work that uses earlier slabs
        self._left = 0  # the last generation that this rank has left
        self._opened: dict[tuple[int, int], Allocation] = {}  # by rank and generation

    def offer(self) -> Any:
        """Return the flags or events for the peers' `open_peer`, representable as JSON.

        Events have no handles if all ranks are in this process.
        """
        if self._flags is not None:
            return self._device.export_flags(self._flags).hex()
        exports = not all(self._local)
        return [(event.handle, self._device.export_event(event).hex() if exports else "") for event in self._events]

    def open_peer(self, peer: int, offer: Any) -> None:
        """Open the flags or events of `peer`, and its slab."""
        if self.by_flags:
            self._peer_flags[peer] = self._device.open_flags(bytes.fromhex(offer))
        else:
            self._peer_events[peer] = [
                Event(handle) if self._local[peer] else self._device.open_event(bytes.fromhex(exported))
                for handle, exported in offer
            ]
        self.slab(peer)

    # Memory.

    def reserve(self, nbytes: int, stream: Stream | None = None) -> None:
        """Make sure that the slab has at least `nbytes`, and publish it if it is a new one.

        Args:
            nbytes: the size that the next use of the channel needs.
            stream: the stream of that use; None for the first slab.
        """
        if self._slabs and self._slabs[self.generation].nbytes >= nbytes:
            return
        whole = max(ALLOCATION_NBYTES, 1 << max(0, nbytes - 1).bit_length())
        slab = self._device.allocate(whole)
        self.generation += 1
        self._slabs[self.generation] = slab
        handle = b"" if all(self._local) else self._device.export(slab)
        self._mine.show_slab(self._number, Slab(self.generation, slab.pointer, handle))
        if stream is not None:
            self._device.wait(stream, self.last)
            self._device.record(self._grown, stream)

    def tidy(self) -> bool:
        """Leave and free earlier slabs if that is possible now; return whether all of them are freed."""
        if len(self._slabs) == 1:
            return True
        earlier = self.generation - 1
        if self._left < earlier and self._has_closed_earlier():
            self._left = earlier
            self._mine.leave_slabs(self._number, earlier)
        left = min(board.left_slabs(self._number) for board in self._boards)
        for generation in [each for each in self._slabs if each <= left and each < self.generation]:
            self._device.free(self._slabs.pop(generation))
        return len(self._slabs) == 1

    def _has_closed_earlier(self) -> bool:
        """Close the earlier slabs of other ranks if no work uses them; return whether the device has closed all."""
        if not is_over(self._device, self._grown):
            return False
        for place in [each for each in self._opened if each[1] < self.generation]:
            self._device.close(self._opened.pop(place))
        return self._device.has_released()

    def slab(self, peer: int) -> int:
        """Return the address in this process of a rank's slab. All ranks must show it: see `behind`."""
        generation = self.generation
        if peer == self._rank:
            return self._slabs[generation].pointer
        if self._local[peer]:
            return self._slab_of(peer, generation).pointer
        place = peer, generation
        if place not in self._opened:
            self._opened[place] = self._device.open(self._slab_of(peer, generation).handle)
        return self._opened[place].pointer

    def _slab_of(self, peer: int, generation: int) -> Slab:
        slab = self._boards[peer].slab(self._number, generation)
        if slab.generation != generation:
            raise InternalError(
                f"rank {peer} announces generation {slab.generation} of its GPU memory, expected {generation}"
            )
        return slab

    def behind(self) -> set[int]:
        """Return the ranks that have not yet published the slab for the current call."""
        boards, generation = self._boards, self.generation
        return {peer for peer, board in enumerate(boards) if board.generation(self._number) < generation}

    def show_operands(self, source: int, target: int) -> None:
        """Publish the addresses of INPUT and OUTPUT for other ranks of this process."""
        self._mine.show_operands(self._number, source, target)

    def operands(self, peer: int) -> tuple[int, int]:
        """Return the addresses of INPUT and OUTPUT of a rank of this process, as of its last signal."""
        return self._boards[peer].operands(self._number)

    # Order by flags.

    def raised_flag(self, peer: int) -> tuple[Flags, int, NextNumber]:
        """Return the flag that the next signal to `peer` raises, as the first arguments of `Device.raise_flag`."""
        flags = self._peer_flags[peer]
        assert flags is not None, "the peers have been opened"
        return flags, self._rank, NextNumber(self._raised, peer)

    def awaited_flag(self, peer: int) -> tuple[Flags, int, NextNumber]:
        """Return the flag by which to wait for the next signal of `peer`; see `Device.await_flag`."""
        assert self._flags is not None, "the channel has flags"
        return self._flags, peer, NextNumber(self._awaited, peer)

    def release(self) -> None:
        """Set the flags for which streams of this rank wait, so that the streams end after a failure."""
        if self._flags is not None:
            self._device.release_flags(self._flags)

    # Order by events.

    def record(self, stream: Stream) -> int | None:
        """Record the next event on `stream` and return the record's number; None if peers still need the event."""
        announced = self._announced[self._recorded % RING]
        if any(self._boards[peer].acknowledged(self._number, self._rank) <= signal for peer, signal in announced):
            return None
        announced.clear()
        self._device.record(self._events[self._recorded % RING], stream)
        self._recorded += 1
        return self._recorded - 1

    def announce(self, peer: int, record: int, digest: int) -> None:
        """Publish one of the last `RING` records at `peer`, as part of the call with `digest`."""
        signal = self._signalled[peer]
        self._announced[record % RING].append((peer, signal))
        self._signalled[peer] += 1
        self._mine.signal(self._number, peer, signal, record, digest)

    def follow(self, peer: int, stream: Stream) -> int | None:
        """Make `stream` wait for the next signal of `peer`, and return its mark; None if it has not come."""
        signal = self._boards[peer].signalled(self._number, self._rank, self._followed[peer])
        if signal is None:
            return None
        event, mark = signal
        if not self._peer_events[peer]:
            raise InternalError(f"rank {peer} signalled before its events were opened")
        self._device.wait(stream, self._peer_events[peer][event])
        self._followed[peer] += 1
        self._mine.acknowledge(self._number, peer, self._followed[peer])
        return mark

    def has_left(self, peer: int) -> bool:
        """Return whether `peer` has closed all memory of other ranks, so that these may free it."""
        return self._boards[peer].has_left

    # The end.

    def close_peers(self) -> None:
        """Close the memory, flags and events of other ranks. No work of this rank may be under way."""
        for opened in self._opened.values():
            self._device.close(opened)
        self._opened.clear()
        for flags in self._peer_flags:
            if flags is not None:
                self._device.end_flags(flags)
        self._peer_flags = [None] * len(self._boards)
        for peer, events in enumerate(self._peer_events):
            for event in () if self._local[peer] else events:
                self._device.end_event(event)
        self._peer_events = [()] * len(self._boards)

    def free(self) -> None:
        """Free this rank's memory and events. All other ranks must have closed them."""
        for slab in self._slabs.values():
            self._device.free(slab)
        self._slabs.clear()
        if self._flags is not None:
            self._device.end_flags(self._flags)
            self._flags = None
        for event in (self.last, self._grown, *self._events):
            self._device.end_event(event)
