"""Sharing: what ranks do to each other's mapped memory is ordered by flags, in every execution.

Three things are proved of every access to a peer's memory: the peer has begun before; it does not end before the access
has ended (its caller may then use the memory); and no other access to the same block happens at the same time, if one
of the two writes, be it by the peer itself or by a third rank. "Before" is what vector clocks say. Messages order
nothing here, because a message of zero bytes is not sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from unisono.algorithms.verifier.block_meaning import PlanSet
from unisono.algorithms.verifier.progress import Event
from unisono.algorithms.verifier.unrolled import Place, UnrolledPlan, cell_name, is_mapped
from unisono.algorithms.verifier.vector_clocks import Clocks
from unisono.errors import PlanError


class _Access(NamedTuple):
    place: Place
    cells: Sequence[int]
    writes: bool


class _Touch(NamedTuple):
    """An access to one cell."""

    place: Place
    cell: int
    writes: bool


def check_sharing(
    family: PlanSet, programs: Sequence[UnrolledPlan], events: Sequence[Event], *, in_place: bool
) -> None:
    """Check that accesses to mapped memory are ordered; also with INPUT and OUTPUT as the same memory, if `in_place`.

    Raises:
        PlanError: names an access, and what may happen before, at the same time, or after.
    """
    if not any(is_mapped(program.plan) for program in programs):
        return
    clocks = Clocks(programs, events, flags_only=True)
    accesses: list[list[_Access]] = [[] for _ in programs]
    for program in programs:
        for owner, access in _accesses(program):
            accesses[owner].append(access)
    foreign = [[access for access in of_owner if access.place.rank != rank] for rank, of_owner in enumerate(accesses)]
    for program, of_owner in zip(programs, foreign, strict=True):
        for access in of_owner:
            _check_lifetime(program, access, clocks)
    homes = [family.homes(rank) for rank in range(family.size)]
    apart = [list(range(len(home))) for home in homes]
    for layout in (apart, homes) if in_place and homes != apart else (apart,):
        for program, home, of_owner, peers in zip(programs, layout, accesses, foreign, strict=True):
            touches: dict[int, list[_Touch]] = {home[cell]: [] for access in peers for cell in access.cells}
            for place, cells, writes in of_owner if peers else ():
                for cell in cells:
                    if home[cell] in touches:
                        touches[home[cell]].append(_Touch(place, cell, writes))
            for of_cell in touches.values():
                _check_cell(program, of_cell, clocks)


def _accesses(program: UnrolledPlan) -> Iterator[tuple[int, _Access]]:
    """Yield what the steps of a rank read and write, with the rank whose memory it is."""
    for lane, rows in enumerate(program.lanes):
        for number, row in enumerate(rows):
            for index, action in enumerate(row.actions):
                place = Place(program.plan.rank, lane, number, index)
                for writes, operands in ((False, action.reads), (True, action.writes)):
                    for operand in operands:
                        yield operand.owner, _Access(place, operand.cells, writes)


def _check_cell(program: UnrolledPlan, touches: Sequence[_Touch], clocks: Clocks) -> None:
    """Check that all that touch one block of the memory of the rank of `program` are ordered, unless none writes."""
    owner = program.plan.rank
    for written in touches:
        for other in touches if written.writes else ():
            foreign = written.place.rank != owner or other.place.rank != owner
            if foreign and written.place != other.place and not _ordered(written.place, other.place, clocks):
                raise _race(program, written, other)


def _check_lifetime(program: UnrolledPlan, access: _Access, clocks: Clocks) -> None:
    """Check that the rank of `program` has begun when a peer uses its memory, and does not end before that ends."""
    owner, (rank, lane, group, _) = program.plan.rank, access.place
    if not clocks.has_heard(clocks.started[rank, lane, group], owner):
        problem = "which is not known to have begun: no flag comes from it before"
    elif not clocks.knows(clocks.final[owner], rank, lane, group):
        problem = "which may have ended before: no flag tells it that this has ended"
    else:
        return
    does = "writes" if access.writes else "reads"
    raise access.place.error(f"{does} {cell_name(program.plan, access.cells[0])} of rank {owner}, {problem}")


def _ordered(one: Place, other: Place, clocks: Clocks) -> bool:
    return _ended_before(one, other, clocks) or _ended_before(other, one, clocks)


def _ended_before(one: Place, other: Place, clocks: Clocks) -> bool:
    return clocks.knows(clocks.started[other.rank, other.lane, other.group], one.rank, one.lane, one.group)


def _race(program: UnrolledPlan, one: _Touch, other: _Touch) -> PlanError:
    does = {True: "writes", False: "reads"}
    return one.place.error(
        f"race: {does[one.writes]} {cell_name(program.plan, one.cell)} of rank {program.plan.rank} while {other.place} "
        f"{does[other.writes]} it: no flag puts one after the other"
    )
