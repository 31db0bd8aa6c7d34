"""Symbolic execution: what every block holds at the end, as expressions over contributions instead of numbers.

The value of a block is (origin, ranks, lowered, expression): which block of INPUT it is about, whose contributions are
in it, whether it is a result already, and how it was computed. Only values of one origin and of disjoint ranks may be
combined, so that "contains all ranks" means "contains each exactly once".
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from unisono.algorithms.contracts import Family, Origin
from unisono.algorithms.plan import Buffer, Copy, Recv, RecvReduce, Reduce, Send, Span, Step
from unisono.algorithms.program import Cell, Place, Program, sources
from unisono.algorithms.progress import Delivered, Event
from unisono.errors import PlanError


class Value(NamedTuple):
    """What a block holds. `ranks` has bit r set if the contribution of rank r is in it."""

    origin: Origin
    ranks: int
    lowered: bool
    expression: int


class Execution:
    """One symbolic execution of all ranks' programs, with INPUT and OUTPUT as the same memory if `aliased`.

    Args:
        programs: one per rank, in order.
        events: what happens, in a possible order; with programs that are free of hazards, any order gives the same.
        commutative: whether operands may change places; otherwise only neighbouring ranks combine, in their order.

    Raises:
        PlanError: a step reads what was never written, combines what must not be combined, lowers twice, or writes a
            block of another place or length; or, in `check`, the result is not what the collective promises.
    """

    def __init__(
        self,
        family: Family,
        programs: Sequence[Program],
        events: Sequence[Event],
        *,
        aliased: bool,
        commutative: bool,
    ) -> None:
        self._family = family
        self._programs = programs
        self._aliased = aliased
        self._commutative = commutative
        self._numbers: dict[Hashable, int] = {}  # expression → its number: equal expressions have equal numbers
        self._memory: list[dict[Cell, Value]] = [{} for _ in programs]
        self._writers: list[dict[Cell, Place]] = [{} for _ in programs]
        self._fill_inputs()
        for event in events:
            if isinstance(event, Delivered):
                self._deliver(event)
            else:
                for index, step in enumerate(programs[event.rank].lanes[event.lane][event.group].steps):
                    self._run_locally(Place(*event, index), step)

    def check(self) -> None:
        """Check that every rank's OUTPUT holds what the collective promises."""
        for program in self._programs:
            for block in range(program.plan.output.blocks):
                self._check_result(program.plan.rank, block)

    def same_bits(self) -> bool:
        """Return whether all ranks compute every block of OUTPUT by the same expression."""
        outputs = [
            {cell: value.expression for cell, value in memory.items() if cell[0] is Buffer.OUTPUT}
            for memory in self._memory
        ]
        return all(output == outputs[0] for output in outputs)

    def _fill_inputs(self) -> None:
        for program in self._programs:
            rank = program.plan.rank
            for block in range(program.plan.input.blocks):
                origin = self._family.origin(rank, block)
                leaf = self._number(("contribution", origin, rank))
                cell = self._family.shared_cell(rank, (Buffer.INPUT, block)) if self._aliased else (Buffer.INPUT, block)
                self._memory[rank][cell] = Value(origin, 1 << rank, False, leaf)

    def _cells(self, rank: int, span: Span) -> list[Cell]:
        cells = self._programs[rank].cells(span)
        return [self._family.shared_cell(rank, cell) for cell in cells] if self._aliased else cells

    def _deliver(self, event: Delivered) -> None:
        send, receive = self._step(event.sending), self._step(event.receiving)
        assert isinstance(send, Send)
        assert isinstance(receive, (Recv, RecvReduce))
        if send.src.count != receive.dst.count:
            raise event.receiving.error(f"receives {receive.dst.count} blocks of the {send.src.count} that are sent")
        arriving = self._read(event.sending, send.src)
        if isinstance(receive, RecvReduce):
            own = self._read(event.receiving, receive.src)
            operands = (arriving, own) if receive.received_first else (own, arriving)
            arriving = [self._combine(event.receiving, pair) for pair in zip(*operands, strict=True)]
        self._check_lengths(event.receiving, receive.dst, event.sending, send.src)
        self._write(event.receiving, receive, arriving)

    def _run_locally(self, place: Place, step: Step) -> None:
        if isinstance(step, Copy):
            self._write(place, step, self._read(place, step.src))
        elif isinstance(step, Reduce):
            operands = [self._read(place, source) for source in step.sources]
            self._write(place, step, [self._combine(place, values) for values in zip(*operands, strict=True)])

    def _step(self, place: Place) -> Step:
        return self._programs[place.rank].lanes[place.lane][place.group].steps[place.step]

    def _read(self, place: Place, span: Span) -> list[Value]:
        memory = self._memory[place.rank]
        cells = self._cells(place.rank, span)
        for buffer, block in cells:
            if (buffer, block) not in memory:
                raise place.error(f"reads block {block} of {buffer.name}, which nothing was written to")
        return [memory[cell] for cell in cells]

    def _write(self, place: Place, step: Recv | RecvReduce | Copy | Reduce, values: Sequence[Value]) -> None:
        for source in sources(step):
            self._check_lengths(place, step.dst, place, source)
        for cell, value in zip(self._cells(place.rank, step.dst), values, strict=True):
            lowers = not isinstance(step, Recv) and step.lower
            self._memory[place.rank][cell] = self._lower(place, value) if lowers else value
            self._writers[place.rank][cell] = place

    def _check_lengths(self, place: Place, dst: Span, origin: Place, src: Span) -> None:
        """Check that the blocks of `dst`, at `place`, are as long as those of `src`, at `origin`, for all counts."""
        targets = self._programs[place.rank].cells(dst)
        for target, source in zip(targets, self._programs[origin.rank].cells(src), strict=True):
            if self._family.length(place.rank, *target) != self._family.length(origin.rank, *source):
                raise place.error(
                    f"writes block {source[1]} of {source[0].name} of rank {origin.rank} to block {target[1]} of "
                    f"{target[0].name}, which may be of another length"
                )

    def _lower(self, place: Place, value: Value) -> Value:
        if value.lowered:
            raise place.error(f"lowers block {value.origin.block} a second time")
        return value._replace(lowered=True, expression=self._number(("lower", value.expression)))

    def _combine(self, place: Place, values: Sequence[Value]) -> Value:
        """Return the combination of the values, in this order."""
        origin, ranks = values[0].origin, 0
        for value in values:
            self._check_operand(place, origin, ranks, value)
            ranks |= value.ranks
        operands = tuple(value.expression for value in values)
        # Two operands give the same bits in either order; more are combined in theirs and rounded once.
        expression = self._number(frozenset(operands) if len(operands) == 2 else operands)
        return Value(origin, ranks, False, expression)

    def _check_operand(self, place: Place, origin: Origin, ranks: int, value: Value) -> None:
        """Check that `value` can be combined with what has the contributions of `ranks` to `origin`."""
        if value.origin != origin:
            raise place.error(f"combines block {value.origin.block} with block {origin.block}")
        if value.lowered:
            raise place.error(f"combines a value of block {origin.block} that is lowered already")
        if twice := ranks & value.ranks:
            raise place.error(f"the contribution of rank {_lowest(twice)} to block {origin.block} is combined twice")
        if ranks and not self._commutative and ranks.bit_length() != _lowest(value.ranks):
            raise place.error(
                f"rank {_lowest(value.ranks)} follows rank {ranks.bit_length() - 1} in the combination of block "
                f"{origin.block}: contributions must be combined in the order of ranks"
            )

    def _check_result(self, rank: int, block: int) -> None:
        name, cell, promise = f"block {block} of OUTPUT", (Buffer.OUTPUT, block), self._family.promise(rank, block)
        value, place = self._memory[rank].get(cell), self._writers[rank].get(cell)
        if not promise.ranks:
            if place is not None:
                raise place.error(f"writes {name}, which is to be left untouched")
            return
        if value is None or place is None:
            if value is not None and self._aliased and value.origin == promise.origin:
                return
            raise PlanError(f"rank {rank}: {name} is never written")
        if value.origin != promise.origin:
            raise place.error(f"{name} holds {value.origin}, expected {promise.origin}")
        if missing := promise.ranks & ~value.ranks:
            raise place.error(f"{name} is left without the contribution of rank {_lowest(missing)}")
        if surplus := value.ranks & ~promise.ranks:
            raise place.error(f"{name} has the contribution of rank {_lowest(surplus)}, which does not belong there")
        if value.lowered != self._family.contract.reduces:
            raise place.error(f"{name} is left {'not ' if not value.lowered else ''}lowered")

    def _number(self, expression: Hashable) -> int:
        return self._numbers.setdefault(expression, len(self._numbers))


def _lowest(ranks: int) -> int:
    """Return the lowest rank of a set of ranks that is not empty."""
    return (ranks & -ranks).bit_length() - 1
