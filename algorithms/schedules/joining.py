"""Atoms joined into transfers: the steps of a plan.

Atoms of one move whose blocks lie at equal distances become one transfer. Reductions on one rank that add to the same
blocks one after the other become one reduction, so that they round once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from unisono.algorithms.schedules.memory import ScheduleBlock
from unisono.algorithms.schedules.running import Atom


@dataclass(slots=True)
class Transfer:
    """Atoms of one move that become one step of a plan, or a send and a receive.

    Attributes:
        atoms: the atoms, whose blocks lie at equal distances.
        more: blocks that are combined too, in a reduction on one rank: for each further operand, a block for each atom.
        reads_after, writes_after: as in `Atom`, with numbers of transfers.
    """

    atoms: list[Atom]
    more: list[list[ScheduleBlock]] = field(default_factory=list)
    reads_after: set[tuple[int, bool]] = field(default_factory=set)
    writes_after: set[tuple[int, bool]] = field(default_factory=set)

    @property
    def ranks(self) -> tuple[int, int]:
        """The rank of the source, and the rank of the target."""
        return self.atoms[0].ranks

    @property
    def is_local(self) -> bool:
        """Whether it stays on one rank."""
        return self.ranks[0] == self.ranks[1]


def transfers_of(atoms: Sequence[Atom], ends: Sequence[int]) -> list[Transfer]:
    """Return the transfers of a run of a schedule, whose atoms and ends of moves are as in `ScheduleRun`."""
    return _reductions_joined(_joined(atoms, ends))


def _joined(atoms: Sequence[Atom], ends: Sequence[int]) -> list[Transfer]:
    """Join the atoms of each move whose blocks lie at equal distances."""
    runs: list[list[int]] = []
    for start, end in pairwise([0, *ends]):
        for number in range(start, end):
            if number > start and _continue(atoms, runs[-1], number):
                runs[-1].append(number)
            else:
                runs.append([number])
    transfer_of = {number: transfer for transfer, run in enumerate(runs) for number in run}
    transfers = []
    for run in runs:
        members = [atoms[number] for number in run]
        reads = {(transfer_of[other], wrote) for atom in members for other, wrote in atom.reads_after}
        writes = {(transfer_of[other], wrote) for atom in members for other, wrote in atom.writes_after}
        transfers.append(Transfer(members, [], reads, writes))
    return transfers


def _continue(atoms: Sequence[Atom], run: Sequence[int], number: int) -> bool:
    """Return whether an atom continues a run, because its blocks lie at the same distances as those of the run."""
    atom, last = atoms[number], atoms[run[-1]]
    if atom.lower != last.lower or any(other in run for other, _ in atom.reads_after | atom.writes_after):
        return False
    step = _distances(last, atom)
    return step is not None and (len(run) == 1 or step == _distances(atoms[run[-2]], last))


def _distances(first: Atom, second: Atom) -> tuple[int, ...] | None:
    """Return how far the blocks of an atom lie behind those of another; None if they lie in other buffers."""
    distances = []
    for one, other in ((first.source, second.source), (first.target, second.target), (first.own, second.own)):
        if one is None or other is None:
            continue
        if one.buffer is not other.buffer or one.number == other.number:
            return None
        distances.append(other.number - one.number)
    return tuple(distances)


def _reductions_joined(transfers: Sequence[Transfer]) -> list[Transfer]:
    """Join reductions on one rank that add to the same blocks one after the other, so that they round once."""
    dependents: dict[int, set[int]] = {}
    for number, transfer in enumerate(transfers):
        for other, _ in transfer.reads_after | transfer.writes_after:
            dependents.setdefault(other, set()).add(number)
    result = dict(enumerate(transfers))
    for number in range(len(transfers)):
        for other in sorted({other for other, _ in result[number].writes_after}):
            if other in result and dependents[other] == {number} and _adds_to(result[number], result[other]):
                result[number] = _sum_of(other, result.pop(other), result[number])
                break
    place = {number: at for at, number in enumerate(result)}
    for transfer in result.values():
        transfer.reads_after = {(place[other], wrote) for other, wrote in transfer.reads_after}
        transfer.writes_after = {(place[other], wrote) for other, wrote in transfer.writes_after}
    return list(result.values())


def _adds_to(second: Transfer, first: Transfer) -> bool:
    """Return whether a reduction on one rank adds to the blocks that a copy or reduction there has written."""
    if not first.is_local or first.ranks != second.ranks or len(first.atoms) != len(second.atoms):
        return False
    return all(
        not one.lower and one.target == other.own == other.target
        for one, other in zip(first.atoms, second.atoms, strict=True)
    )


def _sum_of(number: int, first: Transfer, second: Transfer) -> Transfer:
    """Return the reduction that does the same as transfer `number`, the first one, and then the second one."""
    before = {(number, True), (number, False)}
    sources = [atom.source for atom in second.atoms]
    if first.atoms[0].own is None:
        atoms = [replace(other, own=one.source) for one, other in zip(first.atoms, second.atoms, strict=True)]
        more = second.more
    else:
        atoms = [replace(one, lower=other.lower) for one, other in zip(first.atoms, second.atoms, strict=True)]
        more = [*first.more, sources, *second.more]
    writes_after = first.writes_after | second.writes_after
    return Transfer(atoms, more, first.reads_after | second.reads_after, writes_after - before)
