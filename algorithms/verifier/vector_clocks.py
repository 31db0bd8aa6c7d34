"""Clocks: what certainly has happened before something, in every execution, and after how many latencies.

A vector clock is, for every lane of every rank, the groups that are known of. It is what the steps of a group can rely
on when they start; what a message or a flag tells, its receiver knows when its own group has ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeAlias

from unisono.algorithms.ir.plan import Signal
from unisono.algorithms.verifier.progress import Delivered, Event, Posted
from unisono.algorithms.verifier.unrolled import UnrolledPlan

_Node: TypeAlias = tuple[int, int, int]  # rank, lane, group
_Moments: TypeAlias = list[list[list[int]]]  # by rank, lane and group


def count_rounds(programs: Sequence[UnrolledPlan], events: Sequence[Event]) -> int:
    """Return the latencies on the longest chain of messages and flags that wait for each other, in one segment."""
    _, ended = moments(programs, events, shortest=0)
    return max((rows[-1] for lanes in ended for rows in lanes if rows), default=0)


def moments(programs: Sequence[UnrolledPlan], events: Sequence[Event], *, shortest: int) -> tuple[_Moments, _Moments]:
    """Return when every group starts and ends, in one segment.

    It starts when what it waits for has ended; a message takes 1 from when both its ends have started, a flag from when
    it is raised, and a group takes `shortest` at least.
    """
    started = [[[0] * len(rows) for rows in program.lanes] for program in programs]
    ended = [[[0] * len(rows) for rows in program.lanes] for program in programs]
    for event in events:
        if isinstance(event, Posted):
            rank, lane, group = event
            moment = ended[rank][lane][group - 1] if group else 0
            for other, before in programs[rank].lanes[lane][group].after:
                moment = max(moment, ended[rank][other][before])
            started[rank][lane][group] = moment
            ended[rank][lane][group] = moment + shortest
            continue
        lane, group, sender, sending, receiver, _ = event
        moment = started[sender][lane][group] + 1
        if type(sending.step) is not Signal:
            moment = max(moment, started[receiver][lane][group] + 1)
            ended[sender][lane][group] = max(ended[sender][lane][group], moment)
        ended[receiver][lane][group] = max(ended[receiver][lane][group], moment)
    return started, ended


class Clocks:
    """What is known in the groups of `programs`, in an execution of `events`: sets of groups, as bits of an integer.

    With `flags_only`, a group is known of when it has ended, which is what a flag tells. A message tells it only if it
    has a byte, so messages do not count. Otherwise a group is known of when it has been posted, as flags and messages
    of at least a byte tell. Who knows of a group knows of all that come before it in its lane.

    Attributes:
        started: what is known when the steps of a group are posted.
        final: what each rank knows when its plan has ended.
    """

    def __init__(self, programs: Sequence[UnrolledPlan], events: Sequence[Event], *, flags_only: bool) -> None:
        self._programs = programs
        # Every rank has a bit that says that it has begun, and then its lanes one for each of their groups.
        self._begun: list[int] = []
        self._first: list[list[int]] = []
        bits = 0
        for program in programs:
            self._begun.append(bits)
            groups = [len(rows) for rows in program.lanes]
            self._first.append([bits + 1 + sum(groups[:lane]) for lane in range(len(groups))])
            bits += 1 + sum(groups)
        self.started: dict[_Node, int] = {}
        self._ended: dict[_Node, int] = {}
        for event in events:
            if isinstance(event, Posted):
                self._post(event)
            elif not flags_only or type(event.sending.step) is Signal:
                self._learn(event, counts_posted=not flags_only)
        self.final = [self._final(program) for program in programs]

    def has_heard(self, known: int, rank: int) -> bool:
        """Return whether it is known that `rank` has begun."""
        return bool(known >> self._begun[rank] & 1)

    def knows(self, known: int, rank: int, lane: int, group: int) -> bool:
        """Return whether a group is known of."""
        return bool(known >> self._first[rank][lane] + group & 1)

    def count(self, known: int, rank: int, lane: int) -> int:
        """Return how many groups of a lane of a rank are known of."""
        groups = len(self._programs[rank].lanes[lane])
        return (known >> self._first[rank][lane] & (1 << groups) - 1).bit_length()

    def _post(self, event: Posted) -> None:
        rank, lane, group = event
        known = 1 << self._begun[rank]
        for before in self._programs[rank].predecessors(lane, group):
            known |= self._after(rank, *before)
        self.started[event] = self._ended[event] = known

    def _after(self, rank: int, lane: int, group: int) -> int:
        """Return what is known when a group has ended."""
        return self._ended[rank, lane, group] | 1 << self._first[rank][lane] + group

    def _learn(self, event: Delivered, *, counts_posted: bool) -> None:
        told = self.started[event.sender, event.lane, event.group]
        if counts_posted:
            told |= 1 << self._first[event.sender][event.lane] + event.group
        self._ended[event.receiver, event.lane, event.group] |= told

    def _final(self, program: UnrolledPlan) -> int:
        known = 0
        for lane, rows in enumerate(program.lanes):
            if rows:
                known |= self._after(program.plan.rank, lane, len(rows) - 1)
        return known


def queue_depth(programs: Sequence[UnrolledPlan], events: Sequence[Event]) -> int:
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
            known = clocks.started[event.sender, event.lane, event.group]
            deepest = max(deepest, len(groups) - bisect_left(groups, clocks.count(known, event.receiver, event.lane)))
    return deepest
