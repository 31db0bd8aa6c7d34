"""Sharing: what ranks do to each other's mapped memory is ordered by flags, in every execution.

Three things are proved of every access to a peer's memory: the peer has begun before; it does not end before the access
has ended (its caller may then use the memory); and no other access to the same block happens at the same time, if one
of the two writes, be it by the peer itself or by a third rank. "Before" is what vector clocks say. Messages order
nothing here, because a message of zero bytes is not sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from unisono.algorithms.clocks import Clocks
from unisono.algorithms.contracts import Family
from unisono.algorithms.program import MAPPED, Place, Program, cell_name
from unisono.algorithms.progress import Event
from unisono.errors import PlanError


class _Access(NamedTuple):
    place: Place
    cell: int
    writes: bool


def check_sharing(family: Family, programs: Sequence[Program], events: Sequence[Event], *, in_place: bool) -> None:
    """Check that accesses to mapped memory are ordered; also with INPUT and OUTPUT as the same memory, if `in_place`.

    Raises:
        PlanError: names an access, and what may happen before, at the same time, or after.
    """
    if not is_mapped(programs):
        return
    clocks = Clocks(programs, events, flags_only=True)
    homes = [family.homes(rank) for rank in range(family.size)]
    apart = [list(range(len(home))) for home in homes]
    for layout in (apart, homes) if in_place else (apart,):
        accesses: dict[tuple[int, int], list[_Access]] = defaultdict(list)
        for program in programs:
            for owner, access in _accesses(program):
                accesses[owner, layout[owner][access.cell]].append(access)
        for (owner, _), of_cell in accesses.items():
            if any(access.place.rank != owner for access in of_cell):
                _check_cell(programs[owner], of_cell, clocks)


def is_mapped(programs: Sequence[Program]) -> bool:
    """Return whether programs have steps that need mapped memory."""
    return any(type(action.step) in MAPPED for program in programs for action in program.actions())


def _accesses(program: Program) -> Iterator[tuple[int, _Access]]:
    """Yield what the steps of a rank read and write, with the rank whose memory it is."""
    for lane, rows in enumerate(program.lanes):
        for number, row in enumerate(rows):
            for index, action in enumerate(row.actions):
                place = Place(program.plan.rank, lane, number, index)
                for writes, operands in ((False, action.reads), (True, action.writes)):
                    for operand in operands:
                        for cell in operand.cells:
                            yield operand.owner, _Access(place, cell, writes)


def _check_cell(program: Program, accesses: Sequence[_Access], clocks: Clocks) -> None:
    """Check all accesses to one block of the memory of the rank of `program`."""
    owner = program.plan.rank
    for access in accesses:
        if access.place.rank != owner:
            _check_lifetime(program, access, clocks)
    for index, written in enumerate(accesses):
        for other_index, other in enumerate(accesses):
            if not written.writes or index == other_index or (other.writes and other_index < index):
                continue
            foreign = written.place.rank != owner or other.place.rank != owner
            if foreign and written.place != other.place and not _ordered(written.place, other.place, clocks):
                raise _race(program, written, other)


def _check_lifetime(program: Program, access: _Access, clocks: Clocks) -> None:
    """Check that the rank of `program` has begun when a peer uses its memory, and does not end before that ends."""
    owner, (rank, lane, group, _) = program.plan.rank, access.place
    does = f"{'writes' if access.writes else 'reads'} {cell_name(program.plan, access.cell)} of rank {owner}"
    if not clocks.has_heard(clocks.started[rank, lane, group], owner):
        raise access.place.error(f"{does}, which is not known to have begun: no flag comes from it before")
    if clocks.final[owner][clocks.slot(rank, lane)] <= group:
        raise access.place.error(f"{does}, which may have ended before: no flag tells it that this has ended")


def _ordered(one: Place, other: Place, clocks: Clocks) -> bool:
    return _ended_before(one, other, clocks) or _ended_before(other, one, clocks)


def _ended_before(one: Place, other: Place, clocks: Clocks) -> bool:
    return clocks.started[other.rank, other.lane, other.group][clocks.slot(one.rank, one.lane)] > one.group


def _race(program: Program, one: _Access, other: _Access) -> PlanError:
    does = {True: "writes", False: "reads"}
    return one.place.error(
        f"race: {does[one.writes]} {cell_name(program.plan, one.cell)} of rank {program.plan.rank} while {other.place} "
        f"{does[other.writes]} it: no flag puts one after the other"
    )
