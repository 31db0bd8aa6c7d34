"""Vector clocks: which groups have happened for certain when a group starts, and after how many latencies.

A vector clock is a set of groups, over all lanes of all ranks. The clock of a group holds the groups that have
happened, in every execution, when its steps start. A message or a flag carries the clock of its sender; the receiver
has it when its own group has ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeAlias

from unisono.algorithms.ir.plan import Signal
from unisono.algorithms.verifier.progress import Delivered, Event, GroupPosted
from unisono.algorithms.verifier.unrolled import UnrolledPlan

_Node: TypeAlias = tuple[int, int, int]  # rank, lane, group
_Moments: TypeAlias = list[list[list[int]]]  # by rank, lane and group


def count_rounds(unrolled_plans: Sequence[UnrolledPlan], events: Sequence[Event]) -> int:
    """Return the number of latencies on the longest chain of messages and flags, in one segment."""
    _, ended = moments(unrolled_plans, events, shortest=0)
    return max((rows[-1] for lanes in ended for rows in lanes if rows), default=0)


def moments(
    unrolled_plans: Sequence[UnrolledPlan], events: Sequence[Event], *, shortest: int
) -> tuple[_Moments, _Moments]:
    """Return when every group starts and when it ends, in one segment.

    A group starts when the groups that it waits for have ended, and takes at least `shortest`. A message takes 1 after
    both its ends have started, and a flag takes 1 after it has been raised.
    """
    started = [[[0] * len(rows) for rows in unrolled.lanes] for unrolled in unrolled_plans]
    ended = [[[0] * len(rows) for rows in unrolled.lanes] for unrolled in unrolled_plans]
    for event in events:
        if isinstance(event, GroupPosted):
            rank, lane, group = event
            moment = ended[rank][lane][group - 1] if group else 0
            for other, before in unrolled_plans[rank].lanes[lane][group].after:
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
    """The vector clocks of one execution. A clock is an integer with one bit for each group.

    With `flags_only`, a clock holds groups that have *ended*, because a flag is raised only then. Messages are ignored,
    because a message of zero bytes is not sent. Without `flags_only`, a clock holds groups that have been *posted*, and
    messages count, as if each had at least one byte. A clock that holds a group holds all earlier groups of its lane.

    Attributes:
        started: for each group, the clock when its steps are posted.
        final: for each rank, the clock when its plan has ended.
    """

    def __init__(self, unrolled_plans: Sequence[UnrolledPlan], events: Sequence[Event], *, flags_only: bool) -> None:
        self._unrolled_plans = unrolled_plans
        # The bits of a rank are: one bit that says that it has begun, then one bit for each group of each lane.
        self._begun: list[int] = []
        self._first: list[list[int]] = []
        bits = 0
        for unrolled in unrolled_plans:
            self._begun.append(bits)
            groups = [len(rows) for rows in unrolled.lanes]
            self._first.append([bits + 1 + sum(groups[:lane]) for lane in range(len(groups))])
            bits += 1 + sum(groups)
        self.started: dict[_Node, int] = {}
        self._ended: dict[_Node, int] = {}
        for event in events:
            if isinstance(event, GroupPosted):
                self._post(event)
            elif not flags_only or type(event.sending.step) is Signal:
                self._learn(event, counts_posted=not flags_only)
        self.final = [self._final(unrolled) for unrolled in unrolled_plans]

    def has_heard(self, clock: int, rank: int) -> bool:
        """Return whether a group with this clock starts for certain only after `rank` has begun."""
        return bool(clock >> self._begun[rank] & 1)

    def covers(self, clock: int, rank: int, lane: int, group: int) -> bool:
        """Return whether a group has ended for certain before a group with this clock starts."""
        return bool(clock >> self._first[rank][lane] + group & 1)

    def count(self, clock: int, rank: int, lane: int) -> int:
        """Return how many groups of a lane of a rank `clock` holds."""
        groups = len(self._unrolled_plans[rank].lanes[lane])
        return (clock >> self._first[rank][lane] & (1 << groups) - 1).bit_length()

    def _post(self, event: GroupPosted) -> None:
        rank, lane, group = event
        clock = 1 << self._begun[rank]
        for before in self._unrolled_plans[rank].predecessors(lane, group):
            clock |= self._after(rank, *before)
        self.started[event] = self._ended[event] = clock

    def _after(self, rank: int, lane: int, group: int) -> int:
        """Return the clock when a group has ended."""
        return self._ended[rank, lane, group] | 1 << self._first[rank][lane] + group

    def _learn(self, event: Delivered, *, counts_posted: bool) -> None:
        reported = self.started[event.sender, event.lane, event.group]
        if counts_posted:
            reported |= 1 << self._first[event.sender][event.lane] + event.group
        self._ended[event.receiver, event.lane, event.group] |= reported

    def _final(self, unrolled: UnrolledPlan) -> int:
        clock = 0
        for lane, rows in enumerate(unrolled.lanes):
            if rows:
                clock |= self._after(unrolled.plan.rank, lane, len(rows) - 1)
        return clock


def queue_depth(unrolled_plans: Sequence[UnrolledPlan], events: Sequence[Event]) -> int:
    """Return the most messages that a link may have to hold, in any execution of one segment in which no send waits.

    When a rank sends, its peer may be anywhere after the last group that the sender's clock holds.
    """
    clocks = Clocks(unrolled_plans, events, flags_only=False)
    sent: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    deepest = 0
    for event in events:
        if isinstance(event, Delivered) and not isinstance(event.sending.step, Signal):
            groups = sent[event.sender, event.receiver, event.lane]
            groups.append(event.group)
            clock = clocks.started[event.sender, event.lane, event.group]
            deepest = max(deepest, len(groups) - bisect_left(groups, clocks.count(clock, event.receiver, event.lane)))
    return deepest
