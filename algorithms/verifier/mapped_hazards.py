"""Hazards on mapped memory: every access to a peer's memory is ordered by flags, in every execution.

Three things are proved of every access to a peer's memory:

- the peer has begun its plan before the access;
- the peer does not end its plan before the access has ended, because its caller may then use the memory;
- no other access to the same block happens at the same time, if one of the two writes. The other access may be the
  peer's own, or a third rank's.

Vector clocks say which event happens before which other. Only flags count as order. Messages do not, because a message
of zero bytes is not sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from unisono.algorithms.verifier.block_meaning import PlanSet
from unisono.algorithms.verifier.progress import Event
from unisono.algorithms.verifier.unrolled import StepLocation, UnrolledPlan, cell_name, is_mapped
from unisono.algorithms.verifier.vector_clocks import Clocks
from unisono.errors import PlanError


class _Access(NamedTuple):
    location: StepLocation
    cells: Sequence[int]
    writes: bool


class _Touch(NamedTuple):
    """An access to one cell."""

    location: StepLocation
    cell: int
    writes: bool


def check_mapped_hazards(
    plan_set: PlanSet, unrolled_plans: Sequence[UnrolledPlan], events: Sequence[Event], *, in_place: bool
) -> None:
    """Check that flags order every access to a peer's memory, as the module docstring says.

    If `in_place`, the check is repeated with INPUT and OUTPUT as the same memory.

    Raises:
        PlanError: an access may happen before the peer has begun its plan, after the peer has ended it, or at the same
            time as a conflicting access. The message names the access and says which of the three.
    """
    if not any(is_mapped(unrolled.plan) for unrolled in unrolled_plans):
        return
    clocks = Clocks(unrolled_plans, events, flags_only=True)
    accesses: list[list[_Access]] = [[] for _ in unrolled_plans]
    for unrolled in unrolled_plans:
        for owner, access in _accesses(unrolled):
            accesses[owner].append(access)
    foreign = [
        [access for access in of_owner if access.location.rank != rank] for rank, of_owner in enumerate(accesses)
    ]
    for unrolled, of_owner in zip(unrolled_plans, foreign, strict=True):
        for access in of_owner:
            _check_lifetime(unrolled, access, clocks)
    homes = [plan_set.homes(rank) for rank in range(plan_set.size)]
    apart = [list(range(len(home))) for home in homes]
    for layout in (apart, homes) if in_place and homes != apart else (apart,):
        for unrolled, home, of_owner, peers in zip(unrolled_plans, layout, accesses, foreign, strict=True):
            touches: dict[int, list[_Touch]] = {home[cell]: [] for access in peers for cell in access.cells}
            for location, cells, writes in of_owner if peers else ():
                for cell in cells:
                    if home[cell] in touches:
                        touches[home[cell]].append(_Touch(location, cell, writes))
            for of_cell in touches.values():
                _check_cell(unrolled, of_cell, clocks)


def _accesses(unrolled: UnrolledPlan) -> Iterator[tuple[int, _Access]]:
    """Yield the accesses of the steps of a rank, each with the rank whose memory it is."""
    for lane, rows in enumerate(unrolled.lanes):
        for number, row in enumerate(rows):
            for index, action in enumerate(row.actions):
                location = StepLocation(unrolled.plan.rank, lane, number, index)
                for writes, operands in ((False, action.reads), (True, action.writes)):
                    for operand in operands:
                        yield operand.owner, _Access(location, operand.cells, writes)


def _check_cell(unrolled: UnrolledPlan, touches: Sequence[_Touch], clocks: Clocks) -> None:
    """Check that all accesses to one block are ordered, except accesses that both read."""
    owner = unrolled.plan.rank
    for written in touches:
        for other in touches if written.writes else ():
            foreign = written.location.rank != owner or other.location.rank != owner
            if (
                foreign
                and written.location != other.location
                and not _ordered(written.location, other.location, clocks)
            ):
                raise _race(unrolled, written, other)


def _check_lifetime(unrolled: UnrolledPlan, access: _Access, clocks: Clocks) -> None:
    """Check that the rank of `unrolled` runs its plan during the whole access of a peer to its memory."""
    owner, (rank, lane, group, _) = unrolled.plan.rank, access.location
    if not clocks.has_heard(clocks.started[rank, lane, group], owner):
        problem = "which may not have begun: no flag comes from it before"
    elif not clocks.covers(clocks.final[owner], rank, lane, group):
        problem = "which may have ended before: no flag to it follows this step"
    else:
        return
    does = "writes" if access.writes else "reads"
    raise access.location.error(f"{does} {cell_name(unrolled.plan, access.cells[0])} of rank {owner}, {problem}")


def _ordered(one: StepLocation, other: StepLocation, clocks: Clocks) -> bool:
    return _ended_before(one, other, clocks) or _ended_before(other, one, clocks)


def _ended_before(one: StepLocation, other: StepLocation, clocks: Clocks) -> bool:
    return clocks.covers(clocks.started[other.rank, other.lane, other.group], one.rank, one.lane, one.group)


def _race(unrolled: UnrolledPlan, one: _Touch, other: _Touch) -> PlanError:
    does = {True: "writes", False: "reads"}
    return one.location.error(
        f"race: {does[one.writes]} {cell_name(unrolled.plan, one.cell)} of rank {unrolled.plan.rank} while "
        f"{other.location} {does[other.writes]} it: no flag puts one after the other"
    )
