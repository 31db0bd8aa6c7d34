"""Liveness: how many blocks of SCRATCH hold, at the same time, a value that is still to be read.

Time is that of *canonical progress*, in one segment: a group starts as soon as all that it waits for has ended, and
takes one unit from when the other ends of its messages have started, too. Where no group comes `after` one of another
lane, that is to say: all ranks run group g of all lanes together, from g to g + 1.

The steps of a group run together, so a value takes its block from the start of the group that writes it to the end of
the last one that reads it, be it a peer that reads it. A value that nothing reads takes none; nor does a block that is
written again while it is being read take two.
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
    """Cells of SCRATCH are read, or written, by a group; in one moment they are read first."""

    start: int
    writes: bool
    end: int
    cells: tuple[int, ...]


def scratch_high_water(programs: Sequence[UnrolledPlan], events: Sequence[Event]) -> int:
    """Return the most blocks of SCRATCH of one rank that hold a value still to be read, at the same time."""
    if not any(program.plan.scratch.blocks for program in programs):
        return 0
    return max(_most_at_a_time(_lives(uses)) for uses in _uses(programs, events))


def _uses(programs: Sequence[UnrolledPlan], events: Sequence[Event]) -> list[list[_Use]]:
    """Return all that is done to the SCRATCH of each rank, in the order of time."""
    started, ended = moments(programs, events, shortest=1)
    first = [first_cell(program.plan, Buffer.SCRATCH) for program in programs]
    uses: list[list[_Use]] = [[] for _ in programs]
    for program in programs:
        for rows, starts, ends in zip(program.lanes, started[program.plan.rank], ended[program.plan.rank], strict=True):
            for row, start, end in zip(rows, starts, ends, strict=True):
                for action in row.actions:
                    for writes, operands in ((False, action.reads), (True, action.writes)):
                        for owner, cells, _ in operands:
                            if cells[0] >= first[owner]:
                                uses[owner].append(_Use(start, writes, end, cells))
    return [sorted(of_rank) for of_rank in uses]


def _lives(uses: Iterable[_Use]) -> Iterator[tuple[int, int]]:
    """Yield from when to when a block is taken, by one value or by several without a gap."""
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
