"""Simulates plans by events: each group of each rank and segment on its own, in the order of time.

This engine follows the meaning of plans exactly. An instance (lane, group, segment) of a rank starts when these have
ended: the group before it in its segment, the segment before it in its group, and the groups of other lanes that it
waits for. A message starts when both its ranks have started their instances, or on an eager
topology when its sender has. It crosses each resource on its way as
soon as earlier messages have crossed it. A rank does one thing at a time: it posts messages, and combines and copies
arrived data.

Time and memory grow with the number of instances. `round_model.py` gives the same result faster for plans with one
segment in which no lane waits for another.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from unisono.tuning.machine.topology import NO_RESOURCE, Floats, Ranks, Topology
from unisono.tuning.simulator.round_model import SimulatedTraffic, transfers, work
from unisono.tuning.simulator.step_table import COPY, EVERY, FLAG, MAPPED, REDUCE, Schedule

_Place: TypeAlias = tuple[int, int, int]  # rank, lane, group


class _Move(NamedTuple):
    """A message, a flag or a read, with the poster's work before it, the transfer, and the latency after it.

    The work is more by `other_peer_s` if the poster's last one had another peer.
    """

    kind: int
    peer: int
    work_s: float
    other_peer_s: float
    transfer_s: float
    latency_s: float
    crosses: tuple[int, ...]


class _Group:
    """The work of one group of one rank in each segment."""

    __slots__ = ("expected", "moves", "waited_for", "waits", "work_s")

    def __init__(self) -> None:
        self.moves: list[_Move] = []
        self.expected = 0
        self.work_s = 0.0
        self.waits = 0
        self.waited_for: list[_Place] = []


class _GroupInstance:
    """A group in one segment, from when it is first waited for until it ends."""

    __slots__ = ("end_s", "open", "posted", "started_s", "waits")

    def __init__(self, waits: int, open_: int) -> None:
        self.waits = waits  # earlier instances that have not ended
        self.open = open_  # messages and reads that have not ended, and the posting itself
        self.started_s = -1.0
        self.end_s = 0.0
        self.posted: list[Callable[[], None]] = []  # messages from peers that wait until this instance starts


def instances(steps: Schedule, segments: int) -> int:
    """Return the number of instances."""
    return steps.size * sum(steps.groups) * segments


def run(steps: Schedule, topology: Topology, nbytes: float, segments: int) -> SimulatedTraffic:
    """Return the traffic of a schedule on vectors of `nbytes`, cut into `segments` segments."""
    return _EventRun(steps, topology, nbytes, segments).go()


class _EventRun:
    def __init__(self, steps: Schedule, topology: Topology, nbytes: float, segments: int) -> None:
        self._schedule, self._topology, self._segments = steps, topology, segments
        self._groups: defaultdict[_Place, _Group] = defaultdict(_Group)
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._count = 0
        self._instances: dict[tuple[_Place, int], _GroupInstance] = {}
        self._free_s = np.zeros(len(topology.capacities)).tolist()
        self._working_s = [0.0] * steps.size
        self._last_peer = [-1] * steps.size
        self._finish_s = [0.0] * steps.size
        self._busy_s = np.zeros(len(topology.capacities))
        self._nbytes, self._messages = np.zeros(len(topology.levels)), np.zeros(len(topology.levels), np.int64)
        self._add_rows(nbytes / segments)
        for wait in steps.after:
            for rank in range(steps.size) if wait.rank == EVERY else (wait.rank,):
                self._groups[rank, wait.lane, wait.group].waits += 1
                self._groups[rank, wait.other, wait.earlier].waited_for.append((rank, wait.lane, wait.group))

    def go(self) -> SimulatedTraffic:
        for rank in range(self._schedule.size):
            for lane, groups in enumerate(self._schedule.groups):
                if groups and not self._group((rank, lane, 0)).waits:
                    self._at(0.0, 0, partial(self._start, (rank, lane, 0), 0))
        while self._events:
            self._now_s, _, _, happen = heapq.heappop(self._events)
            happen()
        return SimulatedTraffic(np.array(self._finish_s), self._nbytes, self._messages, self._busy_s)

    def _at(self, when_s: float, order: int, happen: Callable[[], None]) -> None:
        """Schedule an event; events of the same time run in canonical order."""
        self._count += 1
        heapq.heappush(self._events, (when_s, order, self._count, happen))

    def _group(self, place: _Place) -> _Group:
        return self._groups.get(place, _NOTHING)

    def _instance(self, place: _Place, segment: int) -> _GroupInstance:
        key = place, segment
        if key not in self._instances:
            group = self._group(place)
            before = group.waits + (place[2] > 0) + (segment > 0)
            self._instances[key] = _GroupInstance(before, group.expected + len(group.moves) + 1)
        return self._instances[key]

    def _start(self, place: _Place, segment: int) -> None:
        instance = self._instance(place, segment)
        instance.started_s = self._now_s
        rank, lane, group = place
        posted_s = max(self._now_s, self._working_s[rank])
        for move in self._group(place).moves:
            posted_s += move.work_s + (move.other_peer_s if move.peer != self._last_peer[rank] else 0.0)
            self._last_peer[rank] = move.peer
            target = self._instance((move.peer, lane, group), segment)
            go: Callable[[], None] = partial(self._move, move, posted_s, instance, target, place, segment)
            if move.kind in _ONE_SIDED or target.started_s >= 0 or self._topology.is_eager:
                go()
            else:
                target.posted.append(go)
        self._working_s[rank] = posted_s
        while instance.posted:
            instance.posted.pop(0)()
        self._ended(place, segment, posted_s)

    def _move(
        self, move: _Move, posted_s: float, source: _GroupInstance, target: _GroupInstance, place: _Place, segment: int
    ) -> None:
        start_s = max(posted_s, self._now_s)
        sent_s = start_s
        for resource in move.crosses:
            through_s = max(start_s, self._free_s[resource]) + move.transfer_s / self._topology.capacities[resource]
            self._free_s[resource] = through_s
            sent_s = max(sent_s, through_s)
        self._ended(place, segment, sent_s)
        if move.kind != MAPPED:
            self._ended((move.peer, *place[1:]), segment, sent_s + move.latency_s)

    def _ended(self, place: _Place, segment: int, when_s: float) -> None:
        """Note that a part of an instance ends at `when_s`; when all parts have ended, schedule its work."""
        instance = self._instance(place, segment)
        instance.open -= 1
        instance.end_s = max(instance.end_s, when_s)
        if not instance.open:
            self._at(instance.end_s, place[2] + segment, partial(self._work, place, segment))

    def _work(self, place: _Place, segment: int) -> None:
        work_s = self._group(place).work_s
        end_s = self._now_s
        if work_s:
            end_s = self._working_s[place[0]] = max(self._now_s, self._working_s[place[0]]) + work_s
        self._at(end_s, place[2] + segment, partial(self._finish, place, segment))

    def _finish(self, place: _Place, segment: int) -> None:
        rank, lane, group = place
        del self._instances[place, segment]
        self._finish_s[rank] = max(self._finish_s[rank], self._now_s)
        if group + 1 < self._schedule.groups[lane]:
            self._step((rank, lane, group + 1), segment)
        if segment + 1 < self._segments:
            self._step(place, segment + 1)
        for waiting in self._group(place).waited_for:
            self._step(waiting, segment)

    def _step(self, place: _Place, segment: int) -> None:
        instance = self._instance(place, segment)
        instance.waits -= 1
        if not instance.waits:
            self._at(self._now_s, place[2] + segment, partial(self._start, place, segment))

    def _add_rows(self, nbytes: float) -> None:
        """Expand every row into the groups in which it runs, with its costs, and count the traffic over each level."""
        steps, topology = self._schedule, self._topology
        index = np.repeat(np.arange(len(steps.rank)), steps.times)
        count = np.arange(len(index)) - np.repeat(np.cumsum(steps.times) - steps.times, steps.times)
        rank, kind, lane = steps.rank[index], steps.kind[index], steps.lane[index]
        group = steps.first[index] + count * steps.stride[index]
        size = steps.share[index] * nbytes
        moves = (kind != REDUCE) & (kind != COPY)
        work_s = work(topology, kind, size)
        for at in np.flatnonzero(~moves):
            self._groups[int(rank[at]), int(lane[at]), int(group[at])].work_s += float(work_s[at])
        peer = (steps.peer[index] + count * steps.advance[index]) % steps.size
        chosen = rank[moves], lane[moves], group[moves], peer[moves], kind[moves], size[moves]
        for (source, of_lane, number), move in self._moves(*chosen):
            self._groups[source, of_lane, number].moves.append(move)
            if move.kind != MAPPED:
                self._groups[move.peer, of_lane, number].expected += 1

    def _moves(
        self, rank: Ranks, lane: Ranks, group: Ranks, peer: Ranks, kind: Ranks, size: Floats
    ) -> Iterator[tuple[_Place, _Move]]:
        """Yield each message, flag and read with the group that posts it."""
        topology = self._topology
        mapped = kind == MAPPED
        paths = topology.paths(np.where(mapped, peer, rank), np.where(mapped, rank, peer))
        transfer_s = np.where(kind == FLAG, 0.0, transfers(topology, paths.level, size))
        self._nbytes += self._segments * np.bincount(paths.level, size, len(topology.levels))
        self._messages += self._segments * np.bincount(paths.level, minlength=len(topology.levels))
        for at in range(len(rank)):
            link = topology.levels[paths.level[at]].link
            latency_s = link.latency_s + paths.extra_s[at] + (link.overhead_s if kind[at] == FLAG else 0.0)
            overhead_s, other_peer_s = (0.0, 0.0) if kind[at] in _ONE_SIDED else (link.overhead_s, link.other_peer_s)
            crosses = tuple(int(each) for each in paths.resources[at] if each != NO_RESOURCE)
            for resource in crosses:
                self._busy_s[resource] += self._segments * transfer_s[at] / topology.capacities[resource]
            costs_s = overhead_s, other_peer_s, float(transfer_s[at]), float(latency_s)
            move = _Move(int(kind[at]), int(peer[at]), *costs_s, crosses)
            yield (int(rank[at]), int(lane[at]), int(group[at])), move


_ONE_SIDED = (FLAG, MAPPED)
_NOTHING = _Group()
