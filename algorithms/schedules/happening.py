"""Which events of a schedule happen before others.

The relation is kept as one integer for each event, whose bits are the events before it. That costs n²/8 bytes for n
events, which `MOST_EVENTS` limits to 128 MiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from unisono.algorithms.schedules.moves import Schedule
from unisono.errors import PlanError

MOST_EVENTS = 1 << 15
_MOST_SHOWN = 4


class Happening:
    """The events of a schedule in an order, and which of them happen before others.

    Attributes:
        order: all events, each behind those that precede it.

    Raises:
        PlanError: events wait for each other.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.order = sorted_behind(schedule.before)
        if len(self.order) < len(schedule.events):
            stuck = sorted(set(range(len(schedule.events))) - set(self.order))
            waiting = "; ".join(schedule.events[event] for event in stuck[:_MOST_SHOWN])
            raise PlanError(f"deadlock: these steps wait for each other, or for steps that do: {waiting}")
        self._before = [0] * len(schedule.events)
        for event in self.order:
            for earlier in schedule.before[event]:
                self._before[event] |= self._before[earlier] | 1 << earlier

    def precedes(self, first: int, second: int) -> bool:
        """Return whether `first` happens before `second`, in every run."""
        return bool(self._before[second] >> first & 1)


def sorted_behind(before: Sequence[Sequence[int]]) -> list[int]:
    """Return numbers in an order in which each comes behind those `before` it; numbers on a cycle are missing.

    Of the numbers that may come next, the lowest does.

    >>> sorted_behind([(1,), (), (0, 1)])
    [1, 0, 2]
    """
    behind: list[list[int]] = [[] for _ in before]
    waits = [len(earlier) for earlier in before]
    for number, earlier in enumerate(before):
        for other in earlier:
            behind[other].append(number)
    ready = [number for number, count in enumerate(waits) if not count]
    heapify(ready)
    order = []
    while ready:
        number = heappop(ready)
        order.append(number)
        for other in behind[number]:
            waits[other] -= 1
            if not waits[other]:
                heappush(ready, other)
    return order
