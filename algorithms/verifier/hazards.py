"""Hazards: two steps of a rank that may run at the same time, where one writes a block that the other reads or writes.

Steps of one group run at the same time, and a `Send` reads its source until its group ends. So do steps of different
lanes, unless `after` puts one group behind the other; that two groups are in fact ordered by messages to and fro is not
considered, as no executor could rely on it at every capacity.

Different groups of one lane run at the same time only in different segments. These cannot conflict, by construction:
segment s of a block is the same elements wherever the block is named, blocks of a buffer do not overlap, and blocks
that share memory in place have the same length (`algorithms.families`).

Nor is a group looked at again when it has merely moved on (`Row.moved`). Buffers that are the same memory as a whole
are moved through alike, and of those that share one block, one has that block alone: it is not moved through alike with
the other one unless there is one rank.

What is done to a peer's mapped memory is the subject of `algorithms.sharing`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from itertools import combinations
from typing import TypeAlias

from unisono.algorithms.ir.plan import Copy
from unisono.algorithms.verifier.block_meaning import PlanSet
from unisono.algorithms.verifier.progress import Event, Posted
from unisono.algorithms.verifier.unrolled import Action, Operand, Place, Row, UnrolledPlan, cell_name
from unisono.errors import PlanError

_Node: TypeAlias = tuple[int, int]  # lane, group
_Access: TypeAlias = tuple[Place, int, bool]  # a group, the step in it, and whether that writes


def check_hazards(
    family: PlanSet, programs: Sequence[UnrolledPlan], events: Sequence[Event], *, in_place: bool
) -> None:
    """Check that no two steps of a rank conflict; also with INPUT and OUTPUT as the same memory, if `in_place`.

    Raises:
        PlanError: names the two steps and the block.
    """
    posted: list[list[_Node]] = [[] for _ in programs]
    for event in events:
        if isinstance(event, Posted):
            posted[event.rank].append((event.lane, event.group))
    for program in programs:
        homes = family.homes(program.plan.rank)
        apart = list(range(len(homes)))
        layouts = (apart, homes) if in_place and homes != apart else (apart,)
        _check_groups(program, layouts)
        touched = [_touched(rows, program.plan.rank) for rows in program.lanes] if len(program.lanes) > 1 else []
        for home in layouts:
            if shared := _shared(touched, home):
                _check_lanes(program, home, shared, posted[program.plan.rank])


def _check_groups(program: UnrolledPlan, layouts: Sequence[Sequence[int]]) -> None:
    """Check the steps of each group with each other; in each of `layouts`, the memory of cell c is the cell home[c]."""
    rank = program.plan.rank
    for lane, rows in enumerate(program.lanes):
        for number, row in enumerate(rows):
            if row.moved:
                continue
            written = [cell for action in row.actions for cell in _own(action.writes, rank)]
            if written:
                read = [cell for action in row.actions for cell in _own(action.reads, rank)]
                for home in layouts:
                    different = {home[cell] for cell in written}
                    if len(different) < len(written) or not different.isdisjoint([home[cell] for cell in read]):
                        _check_overlap(program, row, Place(rank, lane, number, 0), home)


def _check_overlap(program: UnrolledPlan, row: Row, place: Place, home: Sequence[int]) -> None:
    """Check a group of which some step writes what this or another one reads or writes."""
    written: dict[int, int] = {}
    for index, action in enumerate(row.actions):
        for cell in _own(action.writes, place.rank) if not _stays(action, home) else ():
            if home[cell] in written:
                raise _conflict(program, cell, (place, index, True), (place, written[home[cell]], True))
            written[home[cell]] = index
    for index, action in enumerate(row.actions):
        for cell in _own(action.reads, place.rank):
            writer = written.get(home[cell], index)
            if writer != index:
                raise _conflict(program, cell, (place, index, False), (place, writer, True))
        if (clobbered := _clobbered(action, home)) is not None:
            named = cell_name(program.plan, clobbered)
            raise place._replace(step=index).error(f"hazard: writes {named} before it has read it")


def _own(operands: Sequence[Operand], rank: int) -> Sequence[int]:
    """Return the cells of operands that are in the memory of `rank`."""
    if len(operands) == 1 and operands[0].owner == rank:
        return operands[0].cells
    return [cell for operand in operands if operand.owner == rank for cell in operand.cells]


def _stays(action: Action, home: Sequence[int]) -> bool:
    """Return whether the step copies blocks to the memory where they are already; executors skip it."""
    if type(action.step) is not Copy or action.step.lower:
        return False
    source, target = action.reads[0].cells, action.writes[0].cells
    return all(home[a] == home[b] for a, b in zip(source, target, strict=True))


def _clobbered(action: Action, home: Sequence[int]) -> int | None:
    """Return a cell that a step reads for another block than the one that it writes there; None if there is none."""
    if not action.writes or len(action.writes[0].cells) == 1:
        return None
    target = action.writes[0]
    becomes = {home[cell]: index for index, cell in enumerate(target.cells)}
    for read in action.reads:
        for index, cell in enumerate(read.cells):
            if read.owner == target.owner and becomes.get(home[cell], index) != index:
                return cell
    return None


def _touched(rows: Sequence[Row], rank: int) -> tuple[set[int], set[int]]:
    """Return the cells of the rank's own that a lane touches, and those of them that it writes."""
    read: set[int] = set()
    written: set[int] = set()
    for row in rows:
        for action in row.actions:
            read.update(_own(action.reads, rank))
            written.update(_own(action.writes, rank))
    return read | written, written


def _shared(touched: Sequence[tuple[set[int], set[int]]], home: Sequence[int]) -> set[int]:
    """Return the memory that one lane writes and another one touches."""
    shared: set[int] = set()
    at_home = [({home[cell] for cell in every}, {home[cell] for cell in written}) for every, written in touched]
    for (every, written), (other_every, other_written) in combinations(at_home, 2):
        shared |= every & other_written | written & other_every
    return shared


def _check_lanes(program: UnrolledPlan, home: Sequence[int], shared: Set[int], posted: Sequence[_Node]) -> None:
    """Check what the steps of different lanes do to the memory that they share.

    `posted` are the groups, in a possible order.
    """
    accesses: dict[int, dict[_Node, tuple[_Access, int]]] = defaultdict(dict)
    for lane, rows in enumerate(program.lanes):
        for number, row in enumerate(rows):
            for index, action in enumerate(row.actions):
                for cell, writes in _accesses(action, program.plan.rank, home):
                    if home[cell] in shared and (writes or (lane, number) not in accesses[home[cell]]):
                        access = (Place(program.plan.rank, lane, number, 0), index, writes)
                        accesses[home[cell]][lane, number] = (access, cell)
    ended_before = _ended_before(program, posted)
    for of_cell in accesses.values():
        for (a, (first, cell)), (b, (second, _)) in combinations(of_cell.items(), 2):
            writes = first[2] or second[2]
            if writes and a[0] != b[0] and ended_before[b][a[0]] <= a[1] and ended_before[a][b[0]] <= b[1]:
                raise _conflict(program, cell, first, second)


def _ended_before(program: UnrolledPlan, posted: Sequence[_Node]) -> dict[_Node, list[int]]:
    """Return, for each (lane, group), how many groups of each lane have certainly ended when it starts."""
    clocks: dict[_Node, list[int]] = {}
    for node in posted:
        clock = [0] * len(program.lanes)
        for lane, group in program.predecessors(*node):
            clock = [max(pair) for pair in zip(clock, clocks[lane, group], strict=True)]
            clock[lane] = max(clock[lane], group + 1)
        clocks[node] = clock
    return clocks


def _accesses(action: Action, rank: int, home: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Yield the cells of its own rank that a step touches, and whether it writes them; reads first."""
    if not _stays(action, home):
        for cell in _own(action.reads, rank):
            yield cell, False
        for cell in _own(action.writes, rank):
            yield cell, True


def _conflict(program: UnrolledPlan, cell: int, first: _Access, second: _Access) -> PlanError:
    (place, index, writes), (other, other_index, other_writes) = first, second
    does = {True: "writes", False: "reads"}
    return place._replace(step=index).error(
        f"hazard: {does[writes]} {cell_name(program.plan, cell)} while {other._replace(step=other_index)} "
        f"{does[other_writes]} it"
    )
