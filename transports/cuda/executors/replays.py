"""Persistent calls as graphs: the device issues all work of such a call again by one call of the driver.

Theory of operation
-------------------
A graph raises flags to the same numbers in every replay, and flags must rise. Numbers are compared cyclically. So a
call has one graph for each third of the numbers, and its replays use them in turn. The k-th signal to a peer raises the
flag to k in one replay, to k + 2**64 / 3 in the next one, then to k + 2 * 2**64 / 3, and then to k again. All of these
rise, so nothing is set back, and no barrier is needed.

A flag must not be compared with a number that is more than a third and a half ahead or behind. So it belongs to one
persistent call on one array, and each pair of ranks that signal do so in both directions (`can_replay`). Then a rank is
at most one replay ahead of a peer that waits for it: to end a replay, it has to wait for that peer.

The wait for the last use of the channel, and the record of this one, stay outside of the graph, because calls that are
issued otherwise wait for them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from unisono.algorithms.ir.plan import Plan, Signal, Wait
from unisono.algorithms.ir.walk import steps_as_run
from unisono.transports.cuda.device import Device, DeviceGraph, Flags, Stream
from unisono.transports.cuda.executors.executor import BoundCall
from unisono.transports.cuda.issued_calls import IssuedCall
from unisono.transports.cuda.kernels.catalogue import MOST_SOURCES
from unisono.transports.cuda.peers.channel import Channel

# The most persistent calls of a communicator that have flags for graphs, counted by array.
MOST_CALLS = 64
# The most ranks: reductions of more arrays take addresses from tables, which each call fills.
MOST_RANKS = MOST_SOURCES
_PARTS = 3
_PART = 2**64 // _PARTS
# A release sets flags to the numbers of one part after the other, because each of them releases two parts only. Their
# number is no multiple of `_PARTS`, so that each release ends with another part.
_RELEASES = 3 * _PARTS + 1
_RELEASE_S = 0.0002


class GraphFlags:
    """The flags for graphs of a group of ranks, as one of them uses them.

    Args:
        rank, size: this rank, and the number of ranks.
        device: this rank's device.
    """

    def __init__(self, rank: int, size: int, device: Device) -> None:
        self._rank, self._size, self._device = rank, size, device
        self._flags: Flags | None = device.new_flags(MOST_CALLS * size)
        self._peer_flags: list[Flags | None] = [None] * size
        self._releases = 0
        self._calls = 0
        self.is_used = False

    def offer(self) -> Any:
        """Return the flags for the peers' `open_peer`, representable as JSON."""
        assert self._flags is not None, "they have not been freed"
        return self._device.export_flags(self._flags).hex()

    def open_peer(self, peer: int, offer: Any) -> None:
        """Open the flags of `peer`."""
        self._peer_flags[peer] = self._device.open_flags(bytes.fromhex(offer))

    def new_call(self) -> int | None:
        """Return the number of a new persistent call; None if there are no flags for it. Equal on all ranks."""
        self._calls += 1
        return self._calls - 1 if self._calls <= MOST_CALLS else None

    def with_flags(self, calls: Sequence[IssuedCall], number: int, part: int) -> list[IssuedCall]:
        """Return the calls that issue a persistent call in the replays of one part, without records and waits.

        Args:
            calls: the calls that issue it with the flags of a channel.
            number: from `new_call`.
            part: which part of the numbers its flags have.
        """
        raised, awaited = [part * _PART] * self._size, [part * _PART] * self._size
        changed = []
        for call in calls:
            if call.method == "raise_flag":
                _, _, following, stream = call.arguments
                raised[following.index] += 1
                flag = self._peer_flags[following.index], self._at(number, self._rank), raised[following.index]
                changed.append(IssuedCall(call.method, (*flag, stream)))
            elif call.method == "await_flag":
                _, peer, _, stream = call.arguments
                awaited[peer] += 1
                flag = self._flags, self._at(number, peer), awaited[peer]
                changed.append(IssuedCall(call.method, (*flag, stream)))
            elif call.method not in ("record", "wait"):
                changed.append(call)
        return changed

    def _at(self, number: int, rank: int) -> int:
        """Return the index of the flag of a call that `rank` raises."""
        return number * self._size + rank

    def release(self) -> None:
        """Set the flags for which streams of this rank wait, so that the streams end after a failure.

        The streams of many replays need several calls of this.
        """
        if self._flags is None or not self.is_used:
            return
        for _ in range(_RELEASES):
            self._device.release_flags(self._flags, self._releases % _PARTS * _PART + _PART // 4)
            self._releases += 1
            time.sleep(_RELEASE_S)

    def close_peers(self) -> None:
        """Close the flags of other ranks. No work of this rank may be under way."""
        for flags in self._peer_flags:
            if flags is not None:
                self._device.end_flags(flags)
        self._peer_flags = [None] * self._size

    def free(self) -> None:
        """Free this rank's flags. All other ranks must have closed them."""
        if self._flags is not None:
            self._device.end_flags(self._flags)
            self._flags = None


class Replays:
    """A persistent call on one array: its first use is issued as any other call, and later ones are replays of graphs.

    One thread at a time uses it.

    Args:
        flags: the flags for graphs.
        device: this rank's device.
        number: from `flags.new_call()`.
    """

    def __init__(self, flags: GraphFlags, device: Device, number: int) -> None:
        self._flags, self._device, self._number = flags, device, number
        self._plans: Sequence[Plan] | None = None
        self._can_replay = False  # those plans
        self._key: tuple[object, ...] | None = None
        self._calls: Sequence[IssuedCall] = ()
        self._graphs: dict[int, DeviceGraph] = {}  # by part
        self._replays = 0

    def takes(self, bound: BoundCall) -> bool:
        """Return whether this use of the call is a replay, equal on all ranks. The first use is none."""
        if self._plans is None:
            self._plans, self._can_replay = bound.plans, can_replay(bound.plans)
            return False
        # Another algorithm has other signals.
        return self._can_replay and bound.plans is self._plans and bound.segments == 1 and not bound.has_factor

    def has(self, key: tuple[object, ...]) -> bool:
        """Return whether the calls to replay are known. `key` says on which arrays, stream and memory they work."""
        return key == self._key

    def keep(self, key: tuple[object, ...], calls: Sequence[IssuedCall]) -> None:
        """Replay `calls` from now on."""
        self.end()
        self._key, self._calls = key, calls

    def replay(self, channel: Channel, stream: Stream) -> None:
        """Issue the call as the next use of `channel`; captures a graph at its first replay in each part."""
        part = self._replays % _PARTS
        self._replays += 1
        self._flags.is_used = True
        if part not in self._graphs:
            self._graphs[part] = self._device.capture(self._flags.with_flags(self._calls, self._number, part), stream)
        self._device.wait(stream, channel.last)
        self._device.launch(self._graphs[part], stream)
        self._device.record(channel.last, stream)

    def end(self) -> None:
        """Release the graphs."""
        while self._graphs:
            self._device.end_graph(self._graphs.popitem()[1])
        self._key = None


def can_replay(plans: Sequence[Plan]) -> bool:
    """Return whether each rank that signals another one also awaits signals of it, in the plans of all ranks."""
    steps = [(plan.rank, step) for plan in plans for _, _, step in steps_as_run(plan)]
    signalled = {(rank, step.peer) for rank, step in steps if isinstance(step, Signal)}
    awaited = {(rank, step.peer) for rank, step in steps if isinstance(step, Wait)}
    return signalled == awaited == {(peer, rank) for rank, peer in signalled}
