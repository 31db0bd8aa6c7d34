"""Programs: the plans of all ranks unrolled for analysis, with a check that each step makes sense on its own.

The memory of a rank is numbered: its *cells* are the blocks of INPUT, then those of OUTPUT, then those of SCRATCH. A
step as run is an `Action`, which names the cells that it reads and writes, in its own rank's memory or, for mapped
memory, in a peer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from unisono.algorithms.plan import (
    Buffer,
    Copy,
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
    """A group as run; `alone` are those of its actions that are neither messages nor flags."""

    actions: tuple[Action, ...]
    alone: tuple[Action, ...]
    after: tuple[tuple[int, int], ...]


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
class Program:
    """A plan with its lanes unrolled: `lanes[lane][group]`, groups as run."""

    plan: Plan
    lanes: tuple[tuple[Row, ...], ...]

    def actions(self) -> Iterator[Action]:
        """Yield every action."""
        for rows in self.lanes:
            for row in rows:
                yield from row.actions

    def place(self, lane: int, group: int, action: Action) -> Place:
        """Return the place of an action of a group."""
        return Place(self.plan.rank, lane, group, self.lanes[lane][group].actions.index(action))

    def predecessors(self, lane: int, group: int) -> list[tuple[int, int]]:
        """Return the (lane, group) of the groups that must have ended before this group starts, in its segment."""
        return [*self.lanes[lane][group].after, *([(lane, group - 1)] if group else [])]


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


def unroll(plans: Sequence[Plan], lengths: Sequence[Sequence[int]]) -> list[Program]:
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


def _unrolled(plan: Plan, operands: Sequence[_Operands]) -> Program:
    program = Program(plan, tuple(tuple(_rows(plan, lane, operands)) for lane in range(len(plan.lanes))))
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
        times, groups = (item.times, item.groups) if isinstance(item, Repeat) else (1, (item,))
        written = []
        for offset, group in enumerate(groups):
            first = Place(plan.rank, lane, number + offset, 0)
            steps = [_WrittenStep(step, first._replace(step=i), operands) for i, step in enumerate(group.steps)]
            written.append((steps, any(type(step) in _ALONE for step in group.steps), group.after))
        for iteration in range(times):
            for steps, some_alone, after in written:
                actions = tuple([step.at(iteration) for step in steps])
                alone = tuple([action for action in actions if type(action.step) in _ALONE]) if some_alone else ()
                yield Row(actions, alone, after)
        number += times * len(groups)


class _WrittenStep:
    """A step as written, at `place` in the first iteration of what repeats it."""

    def __init__(self, step: Step, place: Place, operands: Sequence[_Operands]) -> None:
        self._step = step
        self._place = place
        self._operands = operands
        self._peer = getattr(step, "peer", NO_PEER)
        self._peer_advance = getattr(step, "peer_advance", 0)
        reading, writing = _SPANS[type(step)]
        self._reads, self._writes = list(reading(step, place.rank)), list(writing(step, place.rank))
        self._check()

    def at(self, iteration: int) -> Action:
        """Return the step as run in an iteration."""
        size, peer = len(self._operands), self._peer
        moved = iteration * self._peer_advance
        if moved:
            peer = (peer + moved) % size
        if peer == self._place.rank:
            raise self._place.error(f"rank {peer} cannot be the peer of rank {peer} of {size}")
        reads, writes = self._named(self._reads, iteration, moved), self._named(self._writes, iteration, moved)
        return Action(self._step, peer, reads, writes)

    def _named(self, spans: Sequence[tuple[int, Span]], iteration: int, moved: int) -> tuple[Operand, ...]:
        """Return the operands that spans are in an iteration, where peers have moved on so far."""
        if len(spans) != 1:
            return tuple([self._operands[owner].named(span, iteration)[0] for owner, span in spans])
        owner, span = spans[0]
        if moved and owner != self._place.rank:
            owner = (owner + moved) % len(self._operands)
        return self._operands[owner].named(span, iteration)

    def _check(self) -> None:
        """Check that the ranks and blocks exist, that operands have equally many, and that no INPUT is written."""
        size, spans = len(self._operands), [*self._reads, *self._writes]
        if self._peer != NO_PEER and not 0 <= self._peer < size:
            raise self._place.error(f"rank {self._peer} cannot be the peer of rank {self._place.rank} of {size}")
        for owner, span in spans:
            if not 0 <= owner < size:
                raise self._place.error(f"rank {owner} is none of {size}")
            blocks = self._operands[owner].plan.partition(span.buffer).blocks
            if not 0 < span.count <= blocks or len(set(span.blocks(blocks))) < span.count:
                raise self._place.error(f"{span} does not name different blocks of the {blocks} of {span.buffer.name}")
        if len({span.count for _, span in spans}) > 1:
            raise self._place.error(f"operands have {' and '.join(str(span.count) for _, span in spans)} blocks")
        if not self._reads and isinstance(self._step, (Reduce, ReadReduce)):
            raise self._place.error("reduces nothing")
        if any(span.buffer is Buffer.INPUT for _, span in self._writes):
            raise self._place.error("writes INPUT")


class _Operands:
    """The operands that spans of the memory of one rank are; each is made once, however often it is named."""

    def __init__(self, plan: Plan, lengths: Sequence[int]) -> None:
        self.plan = plan
        self._lengths = lengths
        self._buffers = [(first_cell(plan, buffer), plan.partition(buffer).blocks) for buffer in Buffer]
        self._known: dict[tuple[int, int, int], tuple[Operand]] = {}

    def named(self, span: Span, iteration: int) -> tuple[Operand]:
        """Return the operand that `span` is in an iteration, as a tuple of one."""
        first, blocks = self._buffers[span.buffer]
        start = (span.start + iteration * span.advance) % blocks
        key = (first + start, span.count, span.stride)
        found = self._known.get(key)
        if found is None:
            run = Span(span.buffer, start, span.count, span.stride)
            cells = tuple([first + block for block in self.plan.physical_blocks(run)])
            found = self._known[key] = (Operand(self.plan.rank, cells, tuple([self._lengths[cell] for cell in cells])),)
        return found
