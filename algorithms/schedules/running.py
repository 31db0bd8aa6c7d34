"""One run of a schedule, event by event, and the blocks that each chunk of a move reads and writes.

Every move of one chunk becomes an *atom*: the blocks that it reads and writes (`schedules.memory`), and whether it
completes a result. Two atoms of which one writes a block that the other uses conflict. Their events must be ordered, or
the schedule would depend on chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from unisono.algorithms.ir.contracts import CONTRACTS
from unisono.algorithms.schedules.happening import Happening
from unisono.algorithms.schedules.memory import CELL_NAMES, Content, RankMemory, ScheduleBlock
from unisono.algorithms.schedules.moves import Cell, Schedule
from unisono.errors import PlanError


@dataclass(slots=True)
class Atom:
    """A move of one chunk, as the blocks that it uses.

    Attributes:
        ranks: the rank of the source and that of the target.
        source, target: the blocks that it reads and writes.
        own: the block that is combined with the source; None for a copy.
        kind: how long the blocks are; see `schedules.memory`.
        lower: whether it completes a result.
        reads_after, writes_after: the accesses of other atoms that come before the source is read, and before `own` is
            read and the target written. Each is the number of an atom, and whether its write is meant or its read.
    """

    ranks: tuple[int, int]
    source: ScheduleBlock
    target: ScheduleBlock
    own: ScheduleBlock | None
    kind: int
    lower: bool
    reads_after: set[tuple[int, bool]] = field(default_factory=set)
    writes_after: set[tuple[int, bool]] = field(default_factory=set)


class _Accesses:
    """The last accesses of the chunks of all ranks, for conflicts."""

    def __init__(self, happening: Happening, events: Sequence[str]) -> None:
        self._happening, self._events = happening, events
        # Rank and chunk → the atom that has written it last, and its event; the atoms that have read it since.
        self._writes: dict[tuple[int, Cell], tuple[int, int]] = {}
        self._reads: dict[tuple[int, Cell], list[tuple[int, bool, int]]] = {}

    def read(self, place: tuple[int, Cell], atom: int, event: int, *, by_write: bool) -> set[tuple[int, bool]]:
        """Note that an atom reads a chunk, with its source or when it writes; return the accesses before it."""
        self._reads.setdefault(place, []).append((atom, by_write, event))
        if place not in self._writes:
            return set()
        writer, written_at = self._writes[place]
        self._check(place, written_at, event)
        return {(writer, True)}

    def write(self, place: tuple[int, Cell], atom: int, event: int) -> set[tuple[int, bool]]:
        """Note that an atom writes a chunk; return the accesses before it."""
        earlier = self._reads.pop(place, [])
        if place in self._writes:
            writer, written_at = self._writes[place]
            earlier.append((writer, True, written_at))
        for _, _, at in earlier:
            self._check(place, at, event)
        self._writes[place] = atom, event
        return {(other, by_write) for other, by_write, _ in earlier if other != atom}

    def _check(self, place: tuple[int, Cell], first: int, second: int) -> None:
        if first != second and not self._happening.precedes(first, second):
            rank, (letter, index) = place
            raise PlanError(
                f"this step and {self._events[first]} both use chunk {index} of the {CELL_NAMES[letter]} of "
                f"rank {rank}, one of them writes it, and neither waits for the other"
            )


class ScheduleRun:
    """One run of a schedule.

    Attributes:
        atoms: the atoms, move by move.
        ends: for each move, the number of the first atom behind it. The results of a rank that lie in its input already
            count as a move behind all others.
        memories: the memory of each rank at the end.
    """

    def __init__(self, schedule: Schedule) -> None:
        happening = Happening(schedule)
        self._moves = schedule.moves
        self._accesses = _Accesses(happening, schedule.events)
        self._reduces, self._all_ranks = CONTRACTS[schedule.collective].reduces, (1 << schedule.size) - 1
        self._sources: dict[int, tuple[ScheduleBlock, Content, set[tuple[int, bool]]]] = {}  # by atom
        self.memories = [RankMemory(schedule, rank) for rank in range(schedule.size)]
        self.ends = list(accumulate(len(move.source.cells) for move in schedule.moves))
        written: dict[int, Atom] = {}
        reads = _by_event(move.reads for move in schedule.moves)
        writes = _by_event(move.writes for move in schedule.moves)
        for event in happening.order:
            try:
                for number in reads.get(event, ()):
                    self._read_source(number)
                for number in writes.get(event, ()):
                    written.update(zip(self._atoms_of(number), self._write_target(number), strict=True))
            except PlanError as error:
                raise PlanError(f"{schedule.events[event]}: {error}") from None
        self.atoms = [written[number] for number in range(len(written))]
        for rank, memory in enumerate(self.memories):
            self.atoms += self._results_as_they_are(rank, memory)
            self.ends.append(len(self.atoms))

    def _atoms_of(self, number: int) -> range:
        return range(self.ends[number] - len(self._moves[number].source.cells), self.ends[number])

    def _read_source(self, number: int) -> None:
        (rank, cells), event = self._moves[number].source, self._moves[number].reads
        memory = self.memories[rank]
        for atom, cell in zip(self._atoms_of(number), cells, strict=True):
            after = self._accesses.read((rank, memory.home(cell)), atom, event, by_write=False)
            self._sources[atom] = (*memory.read(cell), after)

    def _write_target(self, number: int) -> list[Atom]:
        move = self._moves[number]
        (rank, cells), memory, numbers = move.target, self.memories[move.target.rank], self._atoms_of(number)
        sources = [self._sources.pop(atom) for atom in numbers]
        owns: list[tuple[ScheduleBlock, Content] | None] = [None] * len(cells)
        after: list[set[tuple[int, bool]]] = [set() for _ in cells]
        for at, own in enumerate(move.own or ()):
            after[at] |= self._accesses.read((rank, memory.home(own)), numbers[at], move.writes, by_write=True)
            owns[at] = memory.read(own)
        contents = [_combined(content, own and own[1]) for (_, content, _), own in zip(sources, owns, strict=True)]
        targets = memory.write(cells, contents)
        for at, cell in enumerate(cells):
            after[at] |= self._accesses.write((rank, memory.home(cell)), numbers[at], move.writes)
        ranks = move.source.rank, rank
        return [
            Atom(ranks, source, target, own and own[0], content.kind, self._completes(content, own), read_after, after_)
            for (source, _, read_after), target, own, content, after_ in zip(
                sources, targets, owns, contents, after, strict=True
            )
        ]

    def _completes(self, content: Content, own: tuple[ScheduleBlock, Content] | None) -> bool:
        """Return whether a combination gives a result that was none before."""
        return self._reduces and own is not None and content.ranks == self._all_ranks != own[1].ranks

    def _results_as_they_are(self, rank: int, memory: RankMemory) -> Iterator[Atom]:
        for source, target, content in memory.unwritten():
            lower = self._reduces and content.ranks == self._all_ranks
            yield Atom((rank, rank), source, target, None, content.kind, lower)


def _by_event(events: Iterable[int]) -> dict[int, list[int]]:
    """Return, for each event, the numbers of the moves that it belongs to."""
    numbers: dict[int, list[int]] = {}
    for number, event in enumerate(events):
        numbers.setdefault(event, []).append(number)
    return numbers


def _combined(source: Content, own: Content | None) -> Content:
    return source if own is None else Content(own.kind, own.ranks | source.ranks)
