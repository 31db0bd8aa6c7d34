"""Hazards: conflicts between two steps of one rank that may run at the same time.

Two steps conflict if one of them writes a block that the other reads or writes. Which steps may run at the same time?

- Steps of one group. A `Send`, for example, reads its source until its group ends.
- Steps of different lanes, unless `after` puts one group behind the other. Messages between ranks may also order two
  groups, but the verifier ignores this: an executor cannot rely on it with every amount of buffering.

Different groups of one lane run at the same time only in different segments, and these cannot conflict. Segment s of a
block is the same elements wherever the block is named, and the blocks of a buffer do not overlap. Blocks that are the
same memory in place have the same length (`verifier.block_meaning`).

A group that is an earlier group shifted (`GroupRun.moved`) is not checked again. If two buffers are the same memory as
a whole, their spans are shifted alike. If two buffers share just one block, one of them has only that block. The two
buffers are then not shifted alike, unless there is just one rank.

`verifier.mapped_hazards` covers accesses to a peer's mapped memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from itertools import combinations
from typing import TypeAlias

from unisono.algorithms.ir.plan import Copy
from unisono.algorithms.verifier.block_meaning import PlanSet
from unisono.algorithms.verifier.progress import Event, GroupPosted
from unisono.algorithms.verifier.unrolled import Action, Cells, GroupRun, StepLocation, UnrolledPlan, cell_name
from unisono.errors import PlanError

_Node: TypeAlias = tuple[int, int]  # lane, group
_Access: TypeAlias = tuple[StepLocation, int, bool]  # the group, the number of the step, whether the step writes


def check_hazards(
    plan_set: PlanSet, unrolled_plans: Sequence[UnrolledPlan], events: Sequence[Event], *, in_place: bool
) -> None:
    """Check that no two steps of a rank conflict; if `in_place`, also with INPUT and OUTPUT as the same memory.

    Raises:
        PlanError: two steps conflict; the message names them and the block.
    """
    posted: list[list[_Node]] = [[] for _ in unrolled_plans]
    for event in events:
        if isinstance(event, GroupPosted):
            posted[event.rank].append((event.lane, event.group))
    for unrolled in unrolled_plans:
        homes = plan_set.homes(unrolled.plan.rank)
        apart = list(range(len(homes)))
        layouts = (apart, homes) if in_place and homes != apart else (apart,)
        _check_groups(unrolled, layouts)
        touched = [_touched(rows, unrolled.plan.rank) for rows in unrolled.lanes] if len(unrolled.lanes) > 1 else []
        for home in layouts:
            if shared := _shared(touched, home):
                _check_lanes(unrolled, home, shared, posted[unrolled.plan.rank])


def _check_groups(unrolled: UnrolledPlan, layouts: Sequence[Sequence[int]]) -> None:
    """Check the steps of each group against each other, in each of `layouts`.

    In a layout `home`, the memory of cell c is the cell home[c].
    """
    rank = unrolled.plan.rank
    for lane, rows in enumerate(unrolled.lanes):
        for number, row in enumerate(rows):
            if row.moved:
                continue
            written = [cell for action in row.actions for cell in _cells_of(action.writes, rank)]
            if written:
                read = [cell for action in row.actions for cell in _cells_of(action.reads, rank)]
                for home in layouts:
                    different = {home[cell] for cell in written}
                    if len(different) < len(written) or not different.isdisjoint([home[cell] for cell in read]):
                        _check_overlap(unrolled, row, StepLocation(rank, lane, number, 0), home)


def _check_overlap(unrolled: UnrolledPlan, row: GroupRun, location: StepLocation, home: Sequence[int]) -> None:
    """Check a group that contains a step that writes a cell which this or another step reads or writes."""
    written: dict[int, int] = {}
    for index, action in enumerate(row.actions):
        for cell in _cells_of(action.writes, location.rank) if not _copies_to_itself(action, home) else ():
            if home[cell] in written:
                raise _conflict(unrolled, cell, (location, index, True), (location, written[home[cell]], True))
            written[home[cell]] = index
    for index, action in enumerate(row.actions):
        for cell in _cells_of(action.reads, location.rank):
            writer = written.get(home[cell], index)
            if writer != index:
                raise _conflict(unrolled, cell, (location, index, False), (location, writer, True))
        if (overwritten := _overwritten_before_read(action, home)) is not None:
            name = cell_name(unrolled.plan, overwritten)
            raise location._replace(step=index).error(f"hazard: writes {name} before it has read it")


def _cells_of(operands: Sequence[Cells], rank: int) -> Sequence[int]:
    """Return the cells (block numbers of the memory of a rank) of those operands that belong to `rank`."""
    if len(operands) == 1 and operands[0].owner == rank:
        return operands[0].cells
    return [cell for operand in operands if operand.owner == rank for cell in operand.cells]


def _copies_to_itself(action: Action, home: Sequence[int]) -> bool:
    """Return whether the step copies blocks onto themselves. Executors skip such a step."""
    if type(action.step) is not Copy or action.step.lower:
        return False
    source, target = action.reads[0].cells, action.writes[0].cells
    return all(home[a] == home[b] for a, b in zip(source, target, strict=True))


def _overwritten_before_read(action: Action, home: Sequence[int]) -> int | None:
    """Return a cell that a step overwrites before it has read it for another block; None if there is none."""
    if not action.writes or len(action.writes[0].cells) == 1:
        return None
    target = action.writes[0]
    index_of = {home[cell]: index for index, cell in enumerate(target.cells)}
    for read in action.reads:
        for index, cell in enumerate(read.cells):
            if read.owner == target.owner and index_of.get(home[cell], index) != index:
                return cell
    return None


def _touched(rows: Sequence[GroupRun], rank: int) -> tuple[set[int], set[int]]:
    """Return the cells of the rank's own memory that a lane reads or writes, and those that it writes."""
    read: set[int] = set()
    written: set[int] = set()
    for row in rows:
        for action in row.actions:
            read.update(_cells_of(action.reads, rank))
            written.update(_cells_of(action.writes, rank))
    return read | written, written


def _shared(touched: Sequence[tuple[set[int], set[int]]], home: Sequence[int]) -> set[int]:
    """Return the cells that one lane writes and another lane reads or writes."""
    shared: set[int] = set()
    by_home = [({home[cell] for cell in used}, {home[cell] for cell in written}) for used, written in touched]
    for (used, written), (other_used, other_written) in combinations(by_home, 2):
        shared |= used & other_written | written & other_used
    return shared


def _check_lanes(unrolled: UnrolledPlan, home: Sequence[int], shared: Set[int], posted: Sequence[_Node]) -> None:
    """Check the steps of different lanes on the cells that lanes share.

    `posted` has the groups in a possible order of execution.
    """
    accesses: dict[int, dict[_Node, tuple[_Access, int]]] = defaultdict(dict)
    for lane, rows in enumerate(unrolled.lanes):
        for number, row in enumerate(rows):
            for index, action in enumerate(row.actions):
                for cell, writes in _accesses(action, unrolled.plan.rank, home):
                    if home[cell] in shared and (writes or (lane, number) not in accesses[home[cell]]):
                        access = (StepLocation(unrolled.plan.rank, lane, number, 0), index, writes)
                        accesses[home[cell]][lane, number] = (access, cell)
    ended_before = _ended_before(unrolled, posted)
    for of_cell in accesses.values():
        for (a, (first, cell)), (b, (second, _)) in combinations(of_cell.items(), 2):
            writes = first[2] or second[2]
            if writes and a[0] != b[0] and ended_before[b][a[0]] <= a[1] and ended_before[a][b[0]] <= b[1]:
                raise _conflict(unrolled, cell, first, second)


def _ended_before(unrolled: UnrolledPlan, posted: Sequence[_Node]) -> dict[_Node, list[int]]:
    """Return, for each (lane, group), how many groups of each lane must have ended when it starts."""
    clocks: dict[_Node, list[int]] = {}
    for node in posted:
        clock = [0] * len(unrolled.lanes)
        for lane, group in unrolled.predecessors(*node):
            clock = [max(pair) for pair in zip(clock, clocks[lane, group], strict=True)]
            clock[lane] = max(clock[lane], group + 1)
        clocks[node] = clock
    return clocks


def _accesses(action: Action, rank: int, home: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Yield (cell, whether it is written) for each cell of the rank's own memory that a step uses, reads first."""
    if not _copies_to_itself(action, home):
        for cell in _cells_of(action.reads, rank):
            yield cell, False
        for cell in _cells_of(action.writes, rank):
            yield cell, True


def _conflict(unrolled: UnrolledPlan, cell: int, first: _Access, second: _Access) -> PlanError:
    (location, index, writes), (other, other_index, other_writes) = first, second
    does = {True: "writes", False: "reads"}
    return location._replace(step=index).error(
        f"hazard: {does[writes]} {cell_name(unrolled.plan, cell)} while {other._replace(step=other_index)} "
        f"{does[other_writes]} it"
    )
