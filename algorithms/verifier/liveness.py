"""Liveness: how many blocks of SCRATCH hold, at the same time, a value that is read later.

Time is that of *canonical progress*, in one segment. A group starts as soon as the groups that it waits for have ended.
It takes one unit from the moment when the other ends of its messages have started, too. If no group comes `after` a
group of another lane, all ranks together run group g of all lanes from time g to g + 1.

The steps of a group run together. So a value occupies its block from the start of the group that writes it to the end
of the last group that reads it, including groups of peers. A value that nothing reads occupies no block. A block that
is overwritten while it is read still counts once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from unisono.algorithms.ir.plan import Buffer
from unisono.algorithms.verifier.progress import Event
from unisono.algorithms.verifier.unrolled import UnrolledPlan, first_cell
from unisono.algorithms.verifier.vector_clocks import moments


class _Use(NamedTuple):
    """A group reads or writes cells of SCRATCH, from `start` to `end`. At the same moment, reads sort before writes."""

    start: int
    writes: bool
    end: int
    cells: tuple[int, ...]


def scratch_high_water(unrolled_plans: Sequence[UnrolledPlan], events: Sequence[Event]) -> int:
    """Return the most blocks of SCRATCH of one rank that hold, at the same time, a value that is read later."""
    if not any(unrolled.plan.scratch.blocks for unrolled in unrolled_plans):
        return 0
    return max(_most_at_a_time(_lives(uses)) for uses in _uses(unrolled_plans, events))


def _uses(unrolled_plans: Sequence[UnrolledPlan], events: Sequence[Event]) -> list[list[_Use]]:
    """Return the uses of the SCRATCH of each rank, in the order of time."""
    started, ended = moments(unrolled_plans, events, shortest=1)
    first = [first_cell(unrolled.plan, Buffer.SCRATCH) for unrolled in unrolled_plans]
    uses: list[list[_Use]] = [[] for _ in unrolled_plans]
    for unrolled in unrolled_plans:
        for rows, starts, ends in zip(
            unrolled.lanes, started[unrolled.plan.rank], ended[unrolled.plan.rank], strict=True
        ):
            for row, start, end in zip(rows, starts, ends, strict=True):
                for action in row.actions:
                    for writes, operands in ((False, action.reads), (True, action.writes)):
                        for owner, cells, _ in operands:
                            if cells[0] >= first[owner]:
                                uses[owner].append(_Use(start, writes, end, cells))
    return [sorted(of_rank) for of_rank in uses]


def _lives(uses: Iterable[_Use]) -> Iterator[tuple[int, int]]:
    """Yield (from, to) for each period in which a block is occupied, by one value or by several without a gap."""
    taken: dict[int, tuple[int, int]] = {}
    for start, writes, end, cells in uses:
        for cell in cells:
            since, until = taken.get(cell, (start, start))
            if not writes:
                taken[cell] = (since, max(until, end))
            elif until <= start:
                yield since, until
                taken[cell] = (start, start)
    yield from taken.values()


def _most_at_a_time(lives: Iterable[tuple[int, int]]) -> int:
    changes: Counter[int] = Counter()
    for since, until in lives:
        changes[since] += 1
        changes[until] -= 1
    most = now = 0
    for moment in sorted(changes):
        now += changes[moment]
        most = max(most, now)
    return most
