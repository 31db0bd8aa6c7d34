"""From a schedule to the plans of its ranks.

Theory of operation
-------------------
The schedule runs once, event by event, in an order in which each event comes behind those that precede it. Every move
of one chunk becomes an *atom*: the blocks that it reads and writes (`schedules.memory`), and whether it completes a
result. Two atoms of which one writes a block that the other uses conflict. Their events must be ordered, or the
schedule would depend on chance.

Atoms of one move whose blocks lie at equal distances are joined into a *step*: a message, or a copy or reduction on one
rank. Steps that conflict run one after the other, and nothing else does. The *level* of a step is one more than the
highest level of the steps before it. It is the number of its group, on both ranks. A rank sends at most one message to
a peer in a group, so further ones of a level go to groups of that number in other lanes. A group of another lane than
those of the steps before it waits for their groups.

A schedule can need what a plan cannot do: two ranks swap blocks in place, so that each message must leave before the
other one arrives. The steps then wait for each other. The messages of such a circle arrive in SCRATCH, and a copy or a
reduction of their own takes them from there.

Source: the execution model of MSCCL (Cowan et al., "MSCCLang", ASPLOS 2023), of which only the order that data needs is
kept.

Example: a ring allreduce of MSCCL for 2 ranks has a threadblock of 4 steps on each. Its plan has 2 groups: each rank
sends one block and combines the other one; then it sends its result and receives that of the peer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count, pairwise

from unisono.algorithms.builders.lane_pieces import lane_from_groups
from unisono.algorithms.ir.contracts import CONTRACTS
from unisono.algorithms.ir.plan import Copy, Group, Plan, Recv, RecvReduce, Reduce, Send, Span, Step
from unisono.algorithms.schedules.happening import MOST_EVENTS, Happening, sorted_behind
from unisono.algorithms.schedules.memory import Block, Content, RankMemory
from unisono.algorithms.schedules.moves import Cell, Schedule
from unisono.errors import PlanError

_NAMES = {"i": "input", "o": "output", "s": "scratch", "t": "values passed on"}
# Chunks "t" with these numbers and higher ones hold messages that arrive in SCRATCH; schedules use lower ones.
_FIRST_STAGED = 1 << 40
# How many messages a rank may send to a peer at the same time.
_MOST_LANES = 16


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
    source: Block
    target: Block
    own: Block | None
    kind: int
    lower: bool
    reads_after: set[tuple[int, bool]] = field(default_factory=set)
    writes_after: set[tuple[int, bool]] = field(default_factory=set)


@dataclass(slots=True)
class Transfer:
    """Atoms of one move that become one step of a plan, or a send and a receive.

    Attributes:
        atoms: the atoms, whose blocks lie at equal distances.
        more: blocks that are combined too, in a reduction on one rank: for each further operand, a block for each atom.
        reads_after, writes_after: as in `Atom`, with numbers of transfers.
    """

    atoms: list[Atom]
    more: list[list[Block]] = field(default_factory=list)
    reads_after: set[tuple[int, bool]] = field(default_factory=set)
    writes_after: set[tuple[int, bool]] = field(default_factory=set)

    @property
    def ranks(self) -> tuple[int, int]:
        """The rank of the source and that of the target."""
        return self.atoms[0].ranks

    @property
    def is_local(self) -> bool:
        """Whether it stays on one rank."""
        return self.ranks[0] == self.ranks[1]


def plans_of(schedule: Schedule) -> list[Plan]:
    """Return the plans of all ranks. They are not proved: a schedule with wrong results gives plans with wrong results.

    Raises:
        PlanError: steps wait for each other, use a chunk at the same time, read a chunk that nobody has written, or
            write an input that must not change; the message names them.
    """
    if len(schedule.events) > MOST_EVENTS:
        raise PlanError(f"the schedule has {len(schedule.events)} steps, and at most {MOST_EVENTS} can be checked")
    run = _Run(schedule)
    transfers = _reductions_joined(_joined(run.atoms, run.ends))
    levels = _levels(transfers)
    if len(levels) < len(transfers):
        transfers = _through_scratch(transfers, set(range(len(transfers))) - levels.keys(), run.memories)
        levels = _levels(transfers)
    lanes = _lanes(transfers, levels, schedule.size)
    return [
        _plan(schedule, memory, rank, of_rank)
        for rank, (memory, of_rank) in enumerate(zip(run.memories, lanes, strict=True))
    ]


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
                f"this step and {self._events[first]} both use chunk {index} of the {_NAMES[letter]} of rank {rank}, "
                "one of them writes it, and neither waits for the other"
            )


class _Run:
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
        self._sources: dict[int, tuple[Block, Content, set[tuple[int, bool]]]] = {}  # by atom
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
        owns: list[tuple[Block, Content] | None] = [None] * len(cells)
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

    def _completes(self, content: Content, own: tuple[Block, Content] | None) -> bool:
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


def _before(transfers: Sequence[Transfer], number: int) -> list[int]:
    """Return the numbers of the transfers that come directly before another one."""
    transfer = transfers[number]
    return sorted({other for other, _ in transfer.reads_after | transfer.writes_after} - {number})


def _levels(transfers: Sequence[Transfer]) -> dict[int, tuple[int, int]]:
    """Return lane and level of each transfer by its number; those that wait for each other are missing."""
    before = [_before(transfers, number) for number in range(len(transfers))]
    levels: dict[int, tuple[int, int]] = {}
    messages: Counter[tuple[tuple[int, int], int]] = Counter()
    for number in sorted_behind(before):
        transfer = transfers[number]
        level = 1 + max((levels[other][1] for other in before[number]), default=-1)
        if transfer.is_local:
            levels[number] = 0, level
            continue
        while messages[transfer.ranks, level] == _MOST_LANES:
            level += 1
        levels[number] = messages[transfer.ranks, level], level
        messages[transfer.ranks, level] += 1
    return levels


def _lanes(
    transfers: Sequence[Transfer], levels: Mapping[int, tuple[int, int]], size: int
) -> list[list[dict[int, Group]]]:
    """Return the groups of each lane of each rank, by their numbers."""
    lanes = 1 + max((lane for lane, _ in levels.values()), default=0)
    result: list[list[dict[int, Group]]] = [[{} for _ in range(lanes)] for _ in range(size)]
    for number, (lane, level) in sorted(levels.items()):
        before = _before(transfers, number)
        for rank, step in _steps(transfers[number]):
            of_lane = result[rank][lane]
            group = of_lane.get(level, Group(()))
            after = {levels[other] for other in before if rank in transfers[other].ranks and levels[other][0] != lane}
            of_lane[level] = Group((*group.steps, step), tuple(sorted({*group.after, *after})))
    return result


def _through_scratch(
    transfers: Sequence[Transfer], waiting: set[int], memories: Sequence[RankMemory]
) -> list[Transfer]:
    """Return transfers of which the messages in `waiting` arrive in SCRATCH, from where other transfers take them."""
    result: list[Transfer] = []
    read_by: list[int] = []
    written_by: list[int] = []
    numbers = count(_FIRST_STAGED)
    for number, transfer in enumerate(transfers):
        is_split = number in waiting and not transfer.is_local
        parts = _two_parts(transfer, memories[transfer.ranks[1]], numbers) if is_split else (transfer,)
        read_by.append(len(result))
        result += parts
        written_by.append(len(result) - 1)
    for transfer in result:
        for name in ("reads_after", "writes_after"):
            after = {((written_by if wrote else read_by)[other], wrote) for other, wrote in getattr(transfer, name)}
            setattr(transfer, name, after)
    for message, part in zip(read_by, written_by, strict=True):
        if message != part:
            result[part].reads_after = {(message, True)}
    return result


def _two_parts(transfer: Transfer, memory: RankMemory, numbers: Iterator[int]) -> tuple[Transfer, Transfer]:
    """Return a message to SCRATCH, and the transfer from there."""
    atoms = transfer.atoms
    staged = memory.write([("t", next(numbers)) for _ in atoms], [Content(atom.kind, 0) for atom in atoms])
    message = [replace(atom, target=block, own=None, lower=False) for atom, block in zip(atoms, staged, strict=True)]
    rank = transfer.ranks[1]
    part = [replace(atom, ranks=(rank, rank), source=block) for atom, block in zip(atoms, staged, strict=True)]
    return Transfer(message, [], transfer.reads_after), Transfer(part, [], set(), transfer.writes_after)


def _steps(transfer: Transfer) -> list[tuple[int, Step]]:
    """Return the steps of a transfer, each with its rank."""
    atoms, (source_rank, target_rank) = transfer.atoms, transfer.ranks
    source, target = _span([atom.source for atom in atoms]), _span([atom.target for atom in atoms])
    own = _span([atom.own for atom in atoms if atom.own is not None]) if atoms[0].own is not None else None
    lower = atoms[0].lower
    if not transfer.is_local:
        receive = Recv(source_rank, target) if own is None else RecvReduce(source_rank, target, own, lower=lower)
        return [(source_rank, Send(target_rank, source)), (target_rank, receive)]
    if own is None:
        return [(target_rank, Copy(target, source, lower))]
    return [(target_rank, Reduce(target, (own, source, *map(_span, transfer.more)), lower))]


def _span(blocks: Sequence[Block]) -> Span:
    stride = blocks[1].number - blocks[0].number if len(blocks) > 1 else 1
    return Span(blocks[0].buffer, blocks[0].number, len(blocks), stride)


def _plan(schedule: Schedule, memory: RankMemory, rank: int, lanes: Sequence[Mapping[int, Group]]) -> Plan:
    return Plan(
        schedule.collective,
        schedule.name,
        schedule.size,
        rank,
        0,
        memory.input,
        memory.output,
        memory.scratch(),
        lanes=tuple(map(lane_from_groups, lanes)),
    )
