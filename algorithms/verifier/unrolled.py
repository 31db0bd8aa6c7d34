"""Unrolled plans: the plans of all ranks as flat lists of actions, with a check that each step is valid on its own.

The memory of a rank is numbered. Its *cells* are the blocks of INPUT, then the blocks of OUTPUT, then the blocks of
SCRATCH. One run of a step is an `Action`: a step in a `Repeat` has an action for each iteration. An action names the
cells that it reads and writes, in the memory of its own rank or, with mapped memory, of a peer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import NamedTuple

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
    Send,
    Signal,
    Span,
    Step,
    Wait,
    Write,
    as_written,
)
from unisono.algorithms.ir.walk import reads, walk, writes
from unisono.errors import PlanError


class StepLocation(NamedTuple):
    """The position of a step in the plans, counted from 0. A group of a `Repeat` counts once for each iteration."""

    rank: int
    lane: int
    group: int
    step: int

    def __str__(self) -> str:
        return f"rank {self.rank}, lane {self.lane}, group {self.group}, step {self.step}"

    def error(self, problem: str, picture: str = "") -> PlanError:
        """Return the error that reports `problem` at this location, followed by a picture."""
        return PlanError(f"{self}: {problem}{picture}")


class Cells(NamedTuple):
    """Cells of the memory of rank `owner`, in the order of their span, each with the number of its length."""

    owner: int
    cells: tuple[int, ...]
    lengths: tuple[int, ...]


class Action(NamedTuple):
    """One run of a step, in one iteration if the step is in a `Repeat`. `peer` is `NO_PEER` if the step has no peer."""

    step: Step
    peer: int
    reads: tuple[Cells, ...]
    writes: tuple[Cells, ...]


class GroupRun(NamedTuple):
    """One run of a group. A group in a `Repeat` has one row for each iteration.

    Attributes:
        actions: the steps.
        unpaired: the steps that are neither messages nor flags, so that no step of another rank belongs to them.
        after: the groups of other lanes that must have ended before this group starts, as (lane, group).
        moved: whether this group is an earlier group shifted. All its spans of its own rank's memory are shifted by the
            same number of blocks, in buffers with equally many blocks. So two of its spans overlap exactly if the spans
            of the earlier group do.
    """

    actions: tuple[Action, ...]
    unpaired: tuple[Action, ...]
    after: tuple[tuple[int, int], ...]
    moved: bool


SENDING = frozenset((Send, Signal))
RECEIVING = frozenset((Recv, RecvReduce, Wait))
FLAGS = frozenset((Signal, Wait))
MAPPED = frozenset((Read, ReadReduce, Write, Signal, Wait))
REDUCING = frozenset((RecvReduce, Reduce, ReadReduce))
_UNPAIRED = frozenset((Copy, Reduce, Read, ReadReduce, Write))

NO_PEER = -1


@dataclass(frozen=True, slots=True)
class UnrolledPlan:
    """A plan without `Repeat`: `lanes[lane][group]` is one run of a group."""

    plan: Plan
    lanes: tuple[tuple[GroupRun, ...], ...]

    def location(self, lane: int, group: int, action: Action) -> StepLocation:
        """Return the location of an action of a group."""
        return StepLocation(self.plan.rank, lane, group, self.lanes[lane][group].actions.index(action))

    def predecessors(self, lane: int, group: int) -> list[tuple[int, int]]:
        """Return (lane, group) of each group that must end before this group starts, for the same segment of both."""
        return [*self.lanes[lane][group].after, *([(lane, group - 1)] if group else [])]


def is_mapped(plan: Plan) -> bool:
    """Return whether a plan has steps that need mapped memory."""
    return any(type(step) in MAPPED for written in walk(plan) if written.times for step in written.group.steps)


def first_cell(plan: Plan, buffer: Buffer) -> int:
    """Return the cell of block 0 of a buffer."""
    return (0, plan.input.blocks, plan.input.blocks + plan.output.blocks)[buffer]


def block_of(plan: Plan, cell: int) -> tuple[Buffer, int]:
    """Return the buffer of a cell, and the index of its block in that buffer."""
    buffer = max(buffer for buffer in Buffer if plan.partition(buffer).blocks and first_cell(plan, buffer) <= cell)
    return buffer, cell - first_cell(plan, buffer)


def cell_name(plan: Plan, cell: int) -> str:
    """Return the name of a cell for errors, such as "block 2 of OUTPUT"."""
    buffer, block = block_of(plan, cell)
    return f"block {block} of {buffer.name}"


def unroll(plans: Sequence[Plan], lengths: Sequence[Sequence[int]]) -> list[UnrolledPlan]:
    """Return the unrolled plans of all ranks. `lengths` has, for each rank, the number of each cell's length.

    Raises:
        PlanError: a step is wrong whatever the other ranks do: it names a rank or blocks that do not exist, its
            operands have different numbers of blocks, or it writes to INPUT.
    """
    for plan in plans:
        if sorted(plan.permutation) != list(range(len(plan.permutation))):
            raise PlanError(f"rank {plan.rank}: the permutation does not name every block once")
    operands = [_Operands(plan, of_plan) for plan, of_plan in zip(plans, lengths, strict=True)]
    return [_unrolled(plan, operands) for plan in plans]


def _unrolled(plan: Plan, operands: Sequence[_Operands]) -> UnrolledPlan:
    unrolled = UnrolledPlan(plan, tuple(tuple(_rows(plan, lane, operands)) for lane in range(len(plan.lanes))))
    for lane, rows in enumerate(unrolled.lanes):
        for number, row in enumerate(rows):
            for other, group in row.after:
                if other == lane or not 0 <= other < len(unrolled.lanes) or not 0 <= group < len(unrolled.lanes[other]):
                    raise StepLocation(plan.rank, lane, number, 0).error(
                        f"the group waits for group {group} of lane {other}, which is not a group of another lane"
                    )
    return unrolled


def _rows(plan: Plan, lane: int, operands: Sequence[_Operands]) -> Iterator[GroupRun]:
    """Yield the rows of a lane in the order in which they run: one row for each iteration of each group."""
    number = 0
    for item in plan.lanes[lane]:
        times, groups = as_written(item)
        runs = [
            _runs(group, StepLocation(plan.rank, lane, number + offset, 0), operands, times)
            for offset, group in enumerate(groups)
        ]
        for iteration in zip(*runs, strict=True):
            yield from iteration
        number += times * len(groups)


def _runs(group: Group, first: StepLocation, operands: Sequence[_Operands], times: int) -> Iterator[GroupRun]:
    """Return the runs of one group, one for each iteration; the first run is at `first`."""
    steps = [_WrittenStep(step, first, index, operands) for index, step in enumerate(group.steps)]
    columns = [step.run(times) for step in steps]
    unpaired = [column for column, step in zip(columns, group.steps, strict=True) if type(step) in _UNPAIRED]
    moves_alike = times > 1 and len({move for step in steps for move in step.moves()}) <= 1
    rows = zip(
        zip(*columns, strict=True) if columns else repeat((), times),
        zip(*unpaired, strict=True) if unpaired else repeat((), times),
        repeat(group.after, times),
        chain((False,), repeat(moves_alike)),
        strict=False,
    )
    return map(GroupRun._make, rows)


class _WrittenStep:
    """A step in the form that the plan contains: step `index` of a group whose first run is at `first`."""

    def __init__(self, step: Step, first: StepLocation, index: int, operands: Sequence[_Operands]) -> None:
        self._step = step
        self._first, self._index = first, index
        self._operands = operands
        self._peer: int = getattr(step, "peer", NO_PEER)
        self._peer_advance: int = getattr(step, "peer_advance", 0)
        self._reads, self._writes = reads(step, first.rank), writes(step, first.rank)
        self._check()

    def run(self, times: int) -> list[Action]:
        """Return the actions of the step, one for each of `times` iterations."""
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
        """Yield the advance per iteration and the blocks of the buffer, for each span of the rank's own memory."""
        for owner, span in (*self._reads, *self._writes):
            if owner == self._first.rank:
                blocks = self._operands[owner].blocks(span)
                yield span.advance % blocks, blocks

    def _named(self, spans: Sequence[tuple[int, Span]], peers: Sequence[int]) -> Iterable[tuple[Cells, ...]]:
        """Yield the operands of `spans` for each iteration. `peers` has the peer of each iteration."""
        columns = [
            self._operands[owner].named(span, len(peers))
            if owner == self._first.rank or not self._peer_advance
            else [self._operands[peer].at(span, iteration) for iteration, peer in enumerate(peers)]
            for owner, span in spans
        ]
        return zip(*columns, strict=True) if columns else repeat(())

    def _check(self) -> None:
        """Check that ranks and blocks exist, that operands have equally many blocks, and that INPUT is not written."""
        size, spans = len(self._operands), (*self._reads, *self._writes)
        if self._peer != NO_PEER and not 0 <= self._peer < size:
            raise self._error(f"rank {self._peer} cannot be the peer of rank {self._first.rank} of {size}")
        for owner, span in spans:
            if not 0 <= owner < size:
                raise self._error(f"rank {owner} is out of range: there are {size} ranks")
            blocks, count = self._operands[owner].blocks(span), span.count
            if not 0 < count <= blocks or (count > 1 and len(set(span.blocks(blocks))) < count):
                raise self._error(f"{span} does not name different blocks of the {blocks} of {span.buffer.name}")
        if len(spans) > 1 and len({span.count for _, span in spans}) > 1:
            raise self._error(
                f"operands have different numbers of blocks: {' and '.join(str(span.count) for _, span in spans)}"
            )
        if not self._reads and isinstance(self._step, (Reduce, ReadReduce)):
            raise self._error("has no sources: a reduction needs at least one")
        for _, span in self._writes:
            if span.buffer is Buffer.INPUT:
                raise self._error("writes INPUT, which no step may write")

    def _error(self, problem: str) -> PlanError:
        return self._first._replace(step=self._index).error(problem)


class _Operands:
    """The operands for all spans of the memory of one rank. Each operand is created once."""

    def __init__(self, plan: Plan, lengths: Sequence[int]) -> None:
        self._rank = plan.rank
        self._lengths = lengths
        self._cells = [_cells(plan, buffer) for buffer in Buffer]
        # (buffer, count, stride) → start → operand
        self._cache: dict[tuple[int, int, int], dict[int, Cells]] = defaultdict(dict)

    def blocks(self, span: Span) -> int:
        """Return the number of blocks of the buffer of a span."""
        return len(self._cells[span.buffer])

    def named(self, span: Span, times: int) -> list[Cells]:
        """Return the operand of `span` in each of `times` iterations."""
        blocks = len(self._cells[span.buffer])
        if not span.advance % blocks:
            return [self.at(span, 0)] * times
        starts = [(span.start + iteration * span.advance) % blocks for iteration in range(times)]
        operands = self._cache[span.buffer, span.count, span.stride]
        operands.update({start: self._operand(span, start) for start in set(starts) - operands.keys()})
        return [operands[start] for start in starts]

    def at(self, span: Span, iteration: int) -> Cells:
        """Return the operand of `span` in one iteration."""
        start = (span.start + iteration * span.advance) % len(self._cells[span.buffer])
        operands = self._cache[span.buffer, span.count, span.stride]
        if start not in operands:
            operands[start] = self._operand(span, start)
        return operands[start]

    def _operand(self, span: Span, start: int) -> Cells:
        of_buffer, lengths = self._cells[span.buffer], self._lengths
        if span.count == 1:
            cell = of_buffer[start]
            return Cells(self._rank, (cell,), (lengths[cell],))
        blocks, stop = len(of_buffer), start + span.count * span.stride
        cells = tuple([of_buffer[block % blocks] for block in range(start, stop, span.stride)])
        return Cells(self._rank, cells, tuple([lengths[cell] for cell in cells]))


def _cells(plan: Plan, buffer: Buffer) -> list[int]:
    """Return the cells of the blocks of a buffer, in the order in which spans number the blocks."""
    blocks, first = plan.partition(buffer).blocks, first_cell(plan, buffer)
    if not blocks:
        return []
    return [first + block for block in plan.physical_blocks(Span(buffer, 0, blocks))]
