"""Hazards: two steps that may run at the same time, where one writes a block that the other reads or writes.

Steps of one group run at the same time, and a `Send` reads its source until its group ends. So do steps of different
lanes, unless `after` puts one group behind the other; that two groups are in fact ordered by messages to and fro is not
considered, as no executor could rely on it at every capacity.

Different groups of one lane run at the same time only in different segments. These cannot conflict, by construction:
segment s of a block is the same elements wherever the block is named, blocks of a buffer do not overlap, and buffers
that share memory must have the same partition, which is checked here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from unisono.algorithms.contracts import Family
from unisono.algorithms.plan import Copy, Span, Step
from unisono.algorithms.program import Cell, Place, Program, destinations, sources


class _Access(NamedTuple):
    place: Place
    writes: bool


def check_hazards(family: Family, program: Program, posted: Sequence[tuple[int, int]], *, aliased: bool) -> None:
    """Check that no two steps conflict, with INPUT and OUTPUT as the same memory if `aliased`.

    `posted` is the (lane, group) of each group of the program, in a possible order of starting.

    Raises:
        PlanError: names the two steps and the block, or says that the two buffers cannot be the same memory.
    """

    def cells(span: Span) -> list[Cell]:
        found = program.cells(span)
        return [family.shared_cell(program.plan.rank, cell) for cell in found] if aliased else found

    accesses: dict[Cell, list[_Access]] = defaultdict(list)
    for place, step in program.steps():
        for cell, writes in _accesses(cells, place, step):
            accesses[cell].append(_Access(place, writes))
    ended_before = _ended_before(program, posted) if len(program.lanes) > 1 else {}
    for cell, of_cell in accesses.items():
        for first, second in _concurrent(of_cell, ended_before):
            _check_conflict(cell, first, second)


def _accesses(cells: Callable[[Span], list[Cell]], place: Place, step: Step) -> Iterator[tuple[Cell, bool]]:
    """Yield the cells that a step touches, and whether it writes them; check the step for hazards with itself."""
    reads = [cells(span) for span in sources(step)]
    writes = [cell for span in destinations(step) for cell in cells(span)]
    if isinstance(step, Copy) and not step.lower and reads == [writes]:
        return  # the same memory already: executors skip such a copy
    for operand in reads:
        for index, cell in enumerate(operand):
            if cell in writes and writes[index] != cell:
                raise place.error(f"hazard: the step writes {_name(cell)} before it has read it")
            yield cell, False
    for cell in writes:
        yield cell, True


def _ended_before(program: Program, posted: Sequence[tuple[int, int]]) -> dict[tuple[int, int], list[int]]:
    """Return, for each (lane, group), how many groups of each lane have certainly ended when it starts."""
    clocks: dict[tuple[int, int], list[int]] = {}
    for lane, number in posted:
        clock = [0] * len(program.lanes)
        for other_lane, other in program.predecessors(lane, number):
            clock = [max(pair) for pair in zip(clock, clocks[other_lane, other], strict=True)]
            clock[other_lane] = max(clock[other_lane], other + 1)
        clocks[lane, number] = clock
    return clocks


def _concurrent(
    accesses: Sequence[_Access], ended_before: dict[tuple[int, int], list[int]]
) -> Iterable[tuple[_Access, _Access]]:
    """Yield the pairs of accesses, by different steps, that may happen at the same time."""
    by_group: dict[tuple[int, int], list[_Access]] = defaultdict(list)
    for access in accesses:
        by_group[access.place.lane, access.place.group].append(access)
    for together in by_group.values():
        yield from combinations(together, 2)
    if ended_before:
        for (a, of_a), (b, of_b) in combinations(by_group.items(), 2):
            if a[0] != b[0] and ended_before[b][a[0]] <= a[1] and ended_before[a][b[0]] <= b[1]:
                yield from ((first, second) for first in of_a for second in of_b)


def _check_conflict(cell: Cell, first: _Access, second: _Access) -> None:
    if first.place == second.place or not (first.writes or second.writes):
        return
    does = {True: "writes", False: "reads"}
    raise first.place.error(f"hazard: {does[first.writes]} {_name(cell)} while {second.place} {does[second.writes]} it")


def _name(cell: Cell) -> str:
    buffer, block = cell
    return f"block {block} of {buffer.name}"
