"""Clocks: what certainly has happened before something, in every execution, and after how many latencies.

A vector clock counts, for every lane of every rank, the groups that are known of. It is what the steps of a group can
rely on when they start; what a message or a flag tells, its receiver knows when its own group has ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeAlias

from unisono.algorithms.plan import Signal
from unisono.algorithms.program import Program
from unisono.algorithms.progress import Delivered, Event, Posted

_Node: TypeAlias = tuple[int, int, int]  # rank, lane, group

UNKNOWN = -1  # the count of the groups of a rank that is not even known to have begun


def count_rounds(programs: Sequence[Program], events: Sequence[Event]) -> int:
    """Return the latencies on the longest chain of messages and flags that wait for each other, in one segment."""
    started = [[[0] * len(rows) for rows in program.lanes] for program in programs]
    ended = [[[0] * len(rows) for rows in program.lanes] for program in programs]
    for event in events:
        if isinstance(event, Posted):
            rank, lane, group = event
            moment = ended[rank][lane][group - 1] if group else 0
            for other, before in programs[rank].lanes[lane][group].after:
                moment = max(moment, ended[rank][other][before])
            started[rank][lane][group] = ended[rank][lane][group] = moment
            continue
        lane, group, sender, sending, receiver, _ = event
        moment = started[sender][lane][group] + 1
        if type(sending.step) is not Signal:
            moment = max(moment, started[receiver][lane][group] + 1)
            ended[sender][lane][group] = max(ended[sender][lane][group], moment)
        ended[receiver][lane][group] = max(ended[receiver][lane][group], moment)
    return max((rows[-1] for lanes in ended for rows in lanes if rows), default=0)


class Clocks:
    """Vector clocks of the groups of `programs`, in an execution of `events`.

    With `flags_only`, a clock counts groups that have ended, which is what a flag tells. A message tells it only if it
    has a byte, so messages do not count. Otherwise it counts groups that have been posted, as flags and messages of at
    least a byte tell.
    """

    def __init__(self, programs: Sequence[Program], events: Sequence[Event], *, flags_only: bool) -> None:
        self._lanes = max(len(program.lanes) for program in programs)
        self._slots = len(programs) * self._lanes
        self._programs = programs
        self.started: dict[_Node, list[int]] = {}
        self._ended: dict[_Node, list[int]] = {}
        for event in events:
            if isinstance(event, Posted):
                self._post(event)
            elif not flags_only or isinstance(event.sending.step, Signal):
                self._learn(event, counts_posted=not flags_only)
        self.final = [self._final(program) for program in programs]

    def slot(self, rank: int, lane: int) -> int:
        """Return the index in a clock of a lane of a rank."""
        return rank * self._lanes + lane

    def has_heard(self, clock: Sequence[int], rank: int) -> bool:
        """Return whether a clock tells that `rank` has begun."""
        return clock[self.slot(rank, 0)] != UNKNOWN

    def _post(self, event: Posted) -> None:
        rank, lane, group = event
        clock = [UNKNOWN] * self._slots
        clock[self.slot(rank, 0) : self.slot(rank + 1, 0)] = [0] * self._lanes
        for before in self._programs[rank].predecessors(lane, group):
            clock = list(map(max, clock, self._after(rank, *before)))
        self.started[event] = self._ended[event] = clock

    def _after(self, rank: int, lane: int, group: int) -> list[int]:
        """Return what is known when a group has ended."""
        clock = self._ended[rank, lane, group].copy()
        clock[self.slot(rank, lane)] = max(group + 1, clock[self.slot(rank, lane)])
        return clock

    def _learn(self, event: Delivered, *, counts_posted: bool) -> None:
        told = self.started[event.sender, event.lane, event.group]
        node = (event.receiver, event.lane, event.group)
        self._ended[node] = clock = list(map(max, self._ended[node], told))
        if counts_posted:
            clock[self.slot(event.sender, event.lane)] = event.group + 1

    def _final(self, program: Program) -> list[int]:
        """Return what a rank knows when its plan has ended."""
        rank = program.plan.rank
        ends = [self._after(rank, lane, len(rows) - 1) for lane, rows in enumerate(program.lanes) if rows]
        return [max(counts) for counts in zip(*ends, strict=True)] if ends else [UNKNOWN] * self._slots


def queue_depth(programs: Sequence[Program], events: Sequence[Event]) -> int:
    """Return how many messages a link has to hold at most, in any execution of one segment in which no send waits.

    When a rank sends, its peer may be as far behind as what the rank has heard allows.
    """
    clocks = Clocks(programs, events, flags_only=False)
    sent: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    deepest = 0
    for event in events:
        if isinstance(event, Delivered) and not isinstance(event.sending.step, Signal):
            groups = sent[event.sender, event.receiver, event.lane]
            groups.append(event.group)
            posted = clocks.started[event.sender, event.lane, event.group][clocks.slot(event.receiver, event.lane)]
            deepest = max(deepest, len(groups) - bisect_left(groups, posted))
    return deepest
