"""Programs: the plans of all ranks unrolled for analysis, with a check that each step makes sense on its own.

The memory of a rank is numbered: its *cells* are the blocks of INPUT, then those of OUTPUT, then those of SCRATCH. A
step as run is an `Action`, which names the cells that it reads and writes, in its own rank's memory or, for mapped
memory, in a peer's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple, TypeAlias

from unisono.algorithms.ir.plan import (
    Buffer,
    Copy,
    Group,
    Plan,
    Read,
    ReadReduce,
    Recv,
    RecvReduce,
    Reduce,
    Repeat,
    Send,
    Signal,
    Span,
    Step,
    Wait,
    Write,
)
from unisono.errors import PlanError


class Place(NamedTuple):
    """Where in a set of plans something stands; `group` and `step` count from 0, groups as run."""

    rank: int
    lane: int
    group: int
    step: int

    def __str__(self) -> str:
        return f"rank {self.rank}, lane {self.lane}, group {self.group}, step {self.step}"

    def error(self, problem: str, picture: str = "") -> PlanError:
        """Return the error that says what is wrong here, and shows it."""
        return PlanError(f"{self}: {problem}{picture}")


class Operand(NamedTuple):
    """Cells of the memory of rank `owner`, in the order of the span that names them, with their lengths as numbers."""

    owner: int
    cells: tuple[int, ...]
    lengths: tuple[int, ...]


class Action(NamedTuple):
    """A step as run; `peer` is `NO_PEER` where the step has none."""

    step: Step
    peer: int
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]


class Row(NamedTuple):
    """A group as run.

    Attributes:
        actions: its steps.
        alone: those of them that are neither messages nor flags.
        after: what it waits for in other lanes.
        moved: whether it is an earlier group of which everything in its own rank's memory has moved on by as many
            blocks, in buffers of equally many. What is the same memory there is the same memory here.
    """

    actions: tuple[Action, ...]
    alone: tuple[Action, ...]
    after: tuple[tuple[int, int], ...]
    moved: bool


SENDING = frozenset((Send, Signal))
RECEIVING = frozenset((Recv, RecvReduce, Wait))
FLAGS = frozenset((Signal, Wait))
MAPPED = frozenset((Read, ReadReduce, Write, Signal, Wait))
REDUCING = frozenset((RecvReduce, Reduce, ReadReduce))
_ALONE = frozenset((Copy, Reduce, Read, ReadReduce, Write))

NO_PEER = -1

_Spans: TypeAlias = Callable[[Any, int], Sequence[tuple[int, Span]]]


def _source(step: Any, rank: int) -> Sequence[tuple[int, Span]]:
    return ((rank, step.src),)


def _target(step: Any, rank: int) -> Sequence[tuple[int, Span]]:
    return ((rank, step.dst),)


def _nothing(step: Any, rank: int) -> Sequence[tuple[int, Span]]:
    return ()


# What each kind of step reads and writes, as (rank whose memory it is, span).
_SPANS: dict[type, tuple[_Spans, _Spans]] = {
    Send: (_source, _nothing),
    Recv: (_nothing, _target),
    RecvReduce: (_source, _target),
    Copy: (_source, _target),
    Reduce: (lambda step, rank: [(rank, span) for span in step.sources], _target),
    Read: (lambda step, rank: ((step.peer, step.src),), _target),
    ReadReduce: (lambda step, rank: step.sources, _target),
    Write: (_source, lambda step, rank: ((step.peer, step.dst),)),
    Signal: (_nothing, _nothing),
    Wait: (_nothing, _nothing),
}


@dataclass(frozen=True, slots=True)
class UnrolledPlan:
    """A plan with its lanes unrolled: `lanes[lane][group]`, groups as run."""

    plan: Plan
    lanes: tuple[tuple[Row, ...], ...]

    def place(self, lane: int, group: int, action: Action) -> Place:
        """Return the place of an action of a group."""
        return Place(self.plan.rank, lane, group, self.lanes[lane][group].actions.index(action))

    def predecessors(self, lane: int, group: int) -> list[tuple[int, int]]:
        """Return the (lane, group) of the groups that must have ended before this group starts, in its segment."""
        return [*self.lanes[lane][group].after, *([(lane, group - 1)] if group else [])]


def as_written(item: Group | Repeat) -> tuple[int, tuple[Group, ...]]:
    """Return how many times the groups of an item of a lane are run, and the groups."""
    return (item.times, item.groups) if isinstance(item, Repeat) else (1, (item,))


def is_mapped(plan: Plan) -> bool:
    """Return whether a plan has steps that need mapped memory."""
    items = [as_written(item) for lane in plan.lanes for item in lane]
    return any(type(step) in MAPPED for times, groups in items if times for group in groups for step in group.steps)


def first_cell(plan: Plan, buffer: Buffer) -> int:
    """Return the number of the cell of block 0 of a buffer; plan.scratch is the last buffer."""
    return (0, plan.input.blocks, plan.input.blocks + plan.output.blocks)[buffer]


def block_of(plan: Plan, cell: int) -> tuple[Buffer, int]:
    """Return the buffer of a cell, and the index of its block there."""
    buffer = max(buffer for buffer in Buffer if plan.partition(buffer).blocks and first_cell(plan, buffer) <= cell)
    return buffer, cell - first_cell(plan, buffer)


def cell_name(plan: Plan, cell: int) -> str:
    """Return what a cell is called in errors."""
    buffer, block = block_of(plan, cell)
    return f"block {block} of {buffer.name}"


def unroll(plans: Sequence[Plan], lengths: Sequence[Sequence[int]]) -> list[UnrolledPlan]:
    """Return the programs of the plans of all ranks, where `lengths` numbers the lengths of the cells of each rank.

    Raises:
        PlanError: a step makes no sense whatever the others do: it names a rank or blocks that do not exist, its
            operands do not have equally many blocks, or it writes an INPUT.
    """
    for plan in plans:
        if sorted(plan.permutation) != list(range(len(plan.permutation))):
            raise PlanError(f"rank {plan.rank}: the permutation does not name every block once")
    operands = [_Operands(plan, of_plan) for plan, of_plan in zip(plans, lengths, strict=True)]
    return [_unrolled(plan, operands) for plan in plans]


def _unrolled(plan: Plan, operands: Sequence[_Operands]) -> UnrolledPlan:
    program = UnrolledPlan(plan, tuple(tuple(_rows(plan, lane, operands)) for lane in range(len(plan.lanes))))
    for lane, rows in enumerate(program.lanes):
        for number, row in enumerate(rows):
            for other, group in row.after:
                if other == lane or not 0 <= other < len(program.lanes) or not 0 <= group < len(program.lanes[other]):
                    raise Place(plan.rank, lane, number, 0).error(
                        f"the group comes after group {group} of lane {other}, which is not in another lane"
                    )
    return program


def _rows(plan: Plan, lane: int, operands: Sequence[_Operands]) -> Iterator[Row]:
    """Yield the groups of a lane as run."""
    number = 0
    for item in plan.lanes[lane]:
        times, groups = as_written(item)
        runs = [
            _runs(group, Place(plan.rank, lane, number + offset, 0), operands, times)
            for offset, group in enumerate(groups)
        ]
        for iteration in zip(*runs, strict=True):
            yield from iteration
        number += times * len(groups)


def _runs(group: Group, first: Place, operands: Sequence[_Operands], times: int) -> Iterator[Row]:
    """Return a group that runs first at `first`, as run so many times."""
    steps = [_WrittenStep(step, first, index, operands) for index, step in enumerate(group.steps)]
    columns = [step.run(times) for step in steps]
    alone = [column for column, step in zip(columns, group.steps, strict=True) if type(step) in _ALONE]
    moves_alike = times > 1 and len({move for step in steps for move in step.moves()}) <= 1
    rows = zip(
        zip(*columns, strict=True) if columns else repeat((), times),
        zip(*alone, strict=True) if alone else repeat((), times),
        repeat(group.after, times),
        chain((False,), repeat(moves_alike)),
        strict=False,
    )
    return map(Row._make, rows)


class _WrittenStep:
    """A step as written: the step `index` of a group that runs first at `first`."""

    def __init__(self, step: Step, first: Place, index: int, operands: Sequence[_Operands]) -> None:
        self._step = step
        self._first, self._index = first, index
        self._operands = operands
        self._peer: int = getattr(step, "peer", NO_PEER)
        self._peer_advance: int = getattr(step, "peer_advance", 0)
        reading, writing = _SPANS[type(step)]
        self._reads, self._writes = reading(step, first.rank), writing(step, first.rank)
        self._check()

    def run(self, times: int) -> list[Action]:
        """Return the step as run, in so many iterations."""
        size, rank = len(self._operands), self._first.rank
        peers = [self._peer] * times
        if self._peer_advance:
            peers = [(self._peer + iteration * self._peer_advance) % size for iteration in range(times)]
        if rank in peers:
            raise self._error(f"rank {rank} cannot be the peer of rank {rank} of {size}")
        if times == 1:
            reads = tuple([self._operands[owner].at(span, 0) for owner, span in self._reads])
            writes = tuple([self._operands[owner].at(span, 0) for owner, span in self._writes])
            return [Action(self._step, self._peer, reads, writes)]
        columns = (repeat(self._step), peers, self._named(self._reads, peers), self._named(self._writes, peers))
        return list(map(Action._make, zip(*columns, strict=False)))

    def moves(self) -> Iterator[tuple[int, int]]:
        """Yield, for what is in the memory of the rank itself, how far each iteration moves it, in how many blocks."""
        for owner, span in (*self._reads, *self._writes):
            if owner == self._first.rank:
                blocks = self._operands[owner].blocks(span)
                yield span.advance % blocks, blocks

    def _named(self, spans: Sequence[tuple[int, Span]], peers: Sequence[int]) -> Iterable[tuple[Operand, ...]]:
        """Return the operands that spans are in each iteration, where the peer is the one given."""
        columns = [
            self._operands[owner].named(span, len(peers))
            if owner == self._first.rank or not self._peer_advance
            else [self._operands[peer].at(span, iteration) for iteration, peer in enumerate(peers)]
            for owner, span in spans
        ]
        return zip(*columns, strict=True) if columns else repeat(())

    def _check(self) -> None:
        """Check that the ranks and blocks exist, that operands have equally many, and that no INPUT is written."""
        size, spans = len(self._operands), (*self._reads, *self._writes)
        if self._peer != NO_PEER and not 0 <= self._peer < size:
            raise self._error(f"rank {self._peer} cannot be the peer of rank {self._first.rank} of {size}")
        for owner, span in spans:
            if not 0 <= owner < size:
                raise self._error(f"rank {owner} is none of {size}")
            blocks, count = self._operands[owner].blocks(span), span.count
            if not 0 < count <= blocks or (count > 1 and len(set(span.blocks(blocks))) < count):
                raise self._error(f"{span} does not name different blocks of the {blocks} of {span.buffer.name}")
        if len(spans) > 1 and len({span.count for _, span in spans}) > 1:
            raise self._error(f"operands have {' and '.join(str(span.count) for _, span in spans)} blocks")
        if not self._reads and isinstance(self._step, (Reduce, ReadReduce)):
            raise self._error("reduces nothing")
        for _, span in self._writes:
            if span.buffer is Buffer.INPUT:
                raise self._error("writes INPUT")

    def _error(self, problem: str) -> PlanError:
        return self._first._replace(step=self._index).error(problem)


class _Operands:
    """The operands that spans of the memory of one rank are; each is made once, however often it is named."""

    def __init__(self, plan: Plan, lengths: Sequence[int]) -> None:
        self._rank = plan.rank
        self._lengths = lengths
        self._cells = [_cells(plan, buffer) for buffer in Buffer]
        # By buffer, count and stride, and then by start.
        self._known: dict[tuple[int, int, int], dict[int, Operand]] = defaultdict(dict)

    def blocks(self, span: Span) -> int:
        """Return the number of blocks of the buffer of a span."""
        return len(self._cells[span.buffer])

    def named(self, span: Span, times: int) -> list[Operand]:
        """Return the operand that `span` is in each iteration."""
        blocks = len(self._cells[span.buffer])
        if not span.advance % blocks:
            return [self.at(span, 0)] * times
        starts = [(span.start + iteration * span.advance) % blocks for iteration in range(times)]
        known = self._known[span.buffer, span.count, span.stride]
        known.update({start: self._operand(span, start) for start in set(starts) - known.keys()})
        return [known[start] for start in starts]

    def at(self, span: Span, iteration: int) -> Operand:
        """Return the operand that `span` is in an iteration."""
        start = (span.start + iteration * span.advance) % len(self._cells[span.buffer])
        known = self._known[span.buffer, span.count, span.stride]
        if start not in known:
            known[start] = self._operand(span, start)
        return known[start]

    def _operand(self, span: Span, start: int) -> Operand:
        of_buffer, lengths = self._cells[span.buffer], self._lengths
        if span.count == 1:
            cell = of_buffer[start]
            return Operand(self._rank, (cell,), (lengths[cell],))
        blocks, stop = len(of_buffer), start + span.count * span.stride
        cells = tuple([of_buffer[block % blocks] for block in range(start, stop, span.stride)])
        return Operand(self._rank, cells, tuple([lengths[cell] for cell in cells]))


def _cells(plan: Plan, buffer: Buffer) -> list[int]:
    """Return the cells of the blocks of a buffer as spans name them."""
    blocks, first = plan.partition(buffer).blocks, first_cell(plan, buffer)
    if not blocks:
        return []
    return [first + block for block in plan.physical_blocks(Span(buffer, 0, blocks))]
