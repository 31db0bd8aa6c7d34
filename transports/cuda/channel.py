"""A channel between the devices of some ranks: a slab of each, and signals that order their streams.

Theory of operation. To *signal* is to record an event on a stream and then to publish, in host memory, that it was
recorded. To *follow* a signal is to see that on the host, and then to let a stream wait for the event; hence a wait is
issued for records only that have been issued, and no stream waits for what may never come. Each rank has a ring of
events. One is recorded again only when all who were told of its last record have acknowledged that their waits have
been issued, because a wait binds to the record that was issued last.

Ranks of one process share a context, in which handles do not open: they use each other's addresses and events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.errors import InternalError
from unisono.transports.cuda.device import ALLOCATION_NBYTES, Allocation, Device, Event, Stream
from unisono.transports.cuda.peer_board import RING, Board, Slab


class Channel:
    """One of the channels of a group of ranks, as one of them uses it; by one call at a time.

    Args:
        number: which of the channels it is.
        rank: this rank.
        boards: those of all ranks.
        local: whether each rank is in this process.
        device: this rank's device.

    Attributes:
        last: happens when the last use of the channel by this rank is over.
    """

    def __init__(self, number: int, rank: int, boards: Sequence[Board], local: Sequence[bool], device: Device) -> None:
        size = len(boards)
        self._number = number
        self._rank = rank
        self._boards = boards
        self._mine = boards[rank]
        self._local = local
        self._device = device
        self.last = device.new_event()
        self._events = [device.new_event(shared=True) for _ in range(RING)]
        self._peer_events: list[Sequence[Event]] = [()] * size
        self._recorded = 0
        self._told: list[list[tuple[int, int]]] = [[] for _ in range(RING)]  # peers and their signals, by event
        self._signalled, self._followed = [0] * size, [0] * size
        self._slabs: list[Allocation] = []  # the last is in use; others may still be opened by someone
        self._opened: dict[tuple[int, int], Allocation] = {}  # by rank and generation

    def events(self) -> list[tuple[int, str]]:
        """Return what other ranks take for `meet`: the events, and their handles unless all ranks are here."""
        exports = not all(self._local)
        return [(each.handle, self._device.export_event(each).hex() if exports else "") for each in self._events]

    def meet(self, peer: int, events: Sequence[Sequence[Any]]) -> None:
        """Take the `events` of `peer`, and open its slab."""
        self._peer_events[peer] = [
            Event(handle) if self._local[peer] else self._device.open_event(bytes.fromhex(exported))
            for handle, exported in events
        ]
        self.slab(peer)

    # Memory.

    def reserve(self, nbytes: int) -> None:
        """Have a slab of at least `nbytes`, and tell the others if it is a new one."""
        if self._slabs and self._slabs[-1].nbytes >= nbytes:
            return
        whole = max(ALLOCATION_NBYTES, 1 << max(0, nbytes - 1).bit_length())
        made = self._device.allocate(whole)
        self._slabs.append(made)
        handle = b"" if all(self._local) else self._device.export(made)
        self._mine.show_slab(self._number, Slab(len(self._slabs), made.pointer, handle))

    def slab(self, peer: int) -> int:
        """Return the address here of the slab of a rank, as it was when it signalled last."""
        if peer == self._rank:
            return self._slabs[-1].pointer
        board = self._boards[peer]
        if self._local[peer]:
            return board.slab(self._number).pointer
        place = peer, board.generation(self._number)
        if place not in self._opened:
            self._opened[place] = self._device.open(board.slab(self._number).handle)
        return self._opened[place].pointer

    def show_operands(self, source: int, target: int) -> None:
        """Tell other ranks of this process where INPUT and OUTPUT are."""
        self._mine.show_operands(self._number, source, target)

    def operands(self, peer: int) -> tuple[int, int]:
        """Return where INPUT and OUTPUT of a rank of this process are, as it told before it signalled."""
        return self._boards[peer].operands(self._number)

    # Order.

    def record(self, stream: Stream) -> int | None:
        """Record the next event on `stream` and return the number of the record; None if the event is still needed."""
        told = self._told[self._recorded % RING]
        if any(self._boards[peer].acknowledged(self._number, self._rank) <= signal for peer, signal in told):
            return None
        told.clear()
        self._device.record(self._events[self._recorded % RING], stream)
        self._recorded += 1
        return self._recorded - 1

    def tell(self, peer: int, record: int, digest: int) -> None:
        """Publish one of the last `RING` records at `peer`, as part of the call of `digest`."""
        signal = self._signalled[peer]
        self._told[record % RING].append((peer, signal))
        self._signalled[peer] += 1
        self._mine.signal(self._number, peer, signal, record, digest)

    def follow(self, peer: int, stream: Stream) -> int | None:
        """Let `stream` wait for the next signal of `peer`, and return its mark; None if it has not come."""
        found = self._boards[peer].signalled(self._number, self._rank, self._followed[peer])
        if found is None:
            return None
        event, mark = found
        if not self._peer_events[peer]:
            raise InternalError(f"rank {peer} signalled before it was met")
        self._device.wait(stream, self._peer_events[peer][event])
        self._followed[peer] += 1
        self._mine.acknowledge(self._number, peer, self._followed[peer])
        return mark

    def has_left(self, peer: int) -> bool:
        """Return whether `peer` has left."""
        return self._boards[peer].has_left

    # The end.

    def part(self) -> None:
        """Let go of what is of other ranks; nothing of this rank must be under way."""
        for opened in self._opened.values():
            self._device.close(opened)
        self._opened.clear()
        for peer, events in enumerate(self._peer_events):
            for event in () if self._local[peer] else events:
                self._device.end_event(event)
        self._peer_events = [()] * len(self._boards)

    def free(self) -> None:
        """Give back what is of this rank; all others must have parted."""
        for slab in self._slabs:
            self._device.free(slab)
        self._slabs.clear()
        for event in (self.last, *self._events):
            self._device.end_event(event)
