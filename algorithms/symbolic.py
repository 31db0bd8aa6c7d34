"""Symbolic execution: what every block holds at the end, as expressions over contributions instead of numbers.

The value of a block is (origin, ranks, lowered): which data it is about, whose contributions are in it, and whether it
is a result already. Only values of one origin and of disjoint ranks may be combined, so that "contains all ranks" means
"contains each exactly once".

A value is known by the number of the expression that computes it, and equal expressions have equal numbers, so each
combination is judged once, however often it is made, and memory is lists of small integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from unisono.algorithms.contracts import Family, Origin
from unisono.algorithms.picture import contributions
from unisono.algorithms.plan import Buffer, Copy, ReadReduce, RecvReduce, Reduce, Wait
from unisono.algorithms.program import Action, Operand, Place, Program, cell_name, first_cell
from unisono.algorithms.progress import Delivered, Event, Posted
from unisono.errors import PlanError

NOTHING = 0  # the number of what a block holds before anything is written to it


class Value(NamedTuple):
    """What a block holds. `ranks` has bit r set if the contribution of rank r is in it."""

    origin: Origin
    ranks: int
    lowered: bool


class _RefusedError(Exception):
    """Why values cannot be combined, lowered or moved, before it is known where; and a picture of it."""

    def __init__(self, problem: str, picture: str = "") -> None:
        super().__init__(problem)
        self.problem, self.picture = problem, picture


class Values:
    """All values that occur, by number; `commutative` says whether operands may change places."""

    def __init__(self, size: int, *, commutative: bool) -> None:
        self._size = size
        self._commutative = commutative
        self._values = [Value(Origin(0, 0), 0, False)]
        self._leaves: dict[Value, int] = {}
        self._combined: dict[tuple[int, ...], int] = {}
        self._lowered: dict[int, int] = {}

    def __getitem__(self, number: int) -> Value:
        return self._values[number]

    def contribution(self, origin: Origin, rank: int) -> int:
        """Return the value of a block of INPUT."""
        value = Value(origin, 1 << rank, False)
        if value not in self._leaves:
            self._leaves[value] = self._add(value)
        return self._leaves[value]

    def combine(self, operands: tuple[int, ...]) -> int:
        """Return the combination of the operands, in this order."""
        found = self._combined.get(operands)
        if found is not None:
            return found
        values = [self._values[operand] for operand in operands]
        ranks = 0
        for value in values:
            self._check_operand(values[0].origin, ranks, value)
            ranks |= value.ranks
        # Two operands give the same bits in either order; more are combined in theirs and rounded once.
        turned = self._combined.get(operands[::-1]) if len(operands) == 2 else None
        number = self._add(Value(values[0].origin, ranks, False)) if turned is None else turned
        self._combined[operands] = number
        return number

    def lower(self, number: int) -> int:
        """Return the value lowered."""
        value = self._values[number]
        if value.lowered:
            raise _RefusedError(f"lowers {describe(value.origin)} a second time")
        if number not in self._lowered:
            self._lowered[number] = self._add(value._replace(lowered=True))
        return self._lowered[number]

    def _add(self, value: Value) -> int:
        self._values.append(value)
        return len(self._values) - 1

    def _check_operand(self, origin: Origin, ranks: int, value: Value) -> None:
        """Check that `value` can be combined with what has the contributions of `ranks` to `origin`."""
        if value.origin != origin:
            raise _RefusedError(f"combines {describe(value.origin)} with {describe(origin)}")
        if value.lowered:
            raise _RefusedError(f"combines a value of {describe(origin)} that is lowered already")
        problem, twice = "", ranks & value.ranks
        if twice:
            problem = f"the contribution of rank {lowest(twice)} to {describe(origin)} is combined twice"
        elif ranks and not self._commutative and ranks.bit_length() != lowest(value.ranks):
            problem = (
                f"rank {lowest(value.ranks)} follows rank {ranks.bit_length() - 1} in the combination of "
                f"{describe(origin)}: contributions must be combined in the order of ranks"
            )
        if problem:
            rows = {"so far": (ranks, ranks & ~twice), "combined with": (value.ranks, value.ranks & ~twice)}
            raise _RefusedError(problem, contributions("contributions, by rank", rows, self._size))


class Execution:
    """One symbolic execution of all ranks' programs.

    Args:
        family: what the blocks of the plans mean.
        programs: one per rank, in order.
        events: what happens, in a possible order; with programs that are free of hazards, any order gives the same.
        in_place: whether the execution must be the same with INPUT and OUTPUT as the same memory.
        commutative: whether operands may change places; otherwise only neighbouring ranks combine, in their order.

    Raises:
        PlanError: a step reads what was never written, or what is overwritten in place, combines what must not be
            combined, lowers twice, or writes a block of another length; or, in `check`, the result is not what the
            collective promises.
    """

    def __init__(
        self,
        family: Family,
        programs: Sequence[Program],
        events: Sequence[Event],
        *,
        in_place: bool,
        commutative: bool,
    ) -> None:
        self._family = family
        self._programs = programs
        self._events = events
        self._values = Values(family.size, commutative=commutative)
        self._homes = [family.homes(rank) for rank in range(family.size)] if in_place else None
        self._inputs = [program.plan.input.blocks for program in programs]
        self._memory = [[NOTHING] * len(family.homes(rank)) for rank in range(family.size)]
        for program in programs:
            rank = program.plan.rank
            for block in range(program.plan.input.blocks):
                self._memory[rank][block] = self._values.contribution(family.origin(rank, block), rank)
        for event in events:
            self._run(event)

    def check(self) -> None:
        """Check that every rank's OUTPUT holds what the collective promises."""
        for rank, block, number in self._outputs():
            promise, value = self._family.promise(rank, block), self._values[number]
            name = f"block {block} of OUTPUT"
            if number == NOTHING and promise.ranks:
                raise PlanError(f"rank {rank}: {name} is never written")
            if number != NOTHING and not promise.ranks:
                raise self._error(rank, block, f"{name} is written, and is to be left untouched")
            if number == NOTHING:
                continue
            if value.origin != promise.origin:
                raise self._error(rank, block, f"{name} holds {describe(value.origin)}, not {describe(promise.origin)}")
            if missing := promise.ranks & ~value.ranks:
                raise self._error(rank, block, f"{name} is left without the contribution of rank {lowest(missing)}")
            if surplus := value.ranks & ~promise.ranks:
                raise self._error(rank, block, f"{name} has the contribution of rank {lowest(surplus)} too many")
            if value.lowered != self._family.contract.reduces:
                raise self._error(rank, block, f"{name} is left {'' if value.lowered else 'not '}lowered")

    def same_bits(self) -> bool:
        """Return whether ranks that are promised the same compute it by the same expression."""
        expressions: dict[object, int] = {}
        return all(
            expressions.setdefault(self._family.promise(rank, block), number) == number
            for rank, block, number in self._outputs()
        )

    def _outputs(self) -> Iterator[tuple[int, int, int]]:
        """Yield (rank, block, value) of every block of OUTPUT."""
        for program in self._programs:
            plan = program.plan
            first = first_cell(plan, Buffer.OUTPUT)
            for block in range(plan.output.blocks):
                yield plan.rank, block, self._memory[plan.rank][first + block]

    def _run(self, event: Event) -> None:
        if isinstance(event, Posted):
            for action in self._programs[event.rank].lanes[event.lane][event.group].alone:
                operands = [self._read(event, action, read) for read in action.reads]
                self._write(event, action, operands, action.reads)
        elif type(event.receiving.step) is not Wait:
            self._deliver(event)

    def _deliver(self, event: Delivered) -> None:
        sending, receiving = event.sending, event.receiving
        sent = self._read(event, sending, sending.reads[0])
        if len(sent) != len(receiving.writes[0].cells):
            room = len(receiving.writes[0].cells)
            raise self._place(event, receiving).error(f"receives {room} blocks of the {len(sent)} that are sent")
        if type(receiving.step) is RecvReduce:
            own = self._read(event, receiving, receiving.reads[0])
            operands = [sent, own] if receiving.step.received_first else [own, sent]
            self._write(event, receiving, operands, (sending.reads[0], receiving.reads[0]))
        else:
            self._write(event, receiving, [sent], sending.reads)

    def _read(self, event: Event, action: Action, operand: Operand) -> list[int]:
        owner, cells = operand.owner, operand.cells
        memory = self._memory[owner]
        values = [memory[cell] for cell in cells]
        if NOTHING in values:
            name = cell_name(self._programs[owner].plan, cells[values.index(NOTHING)])
            place = self._place(event, action)
            whose = "" if owner == place.rank else f" of rank {owner}"
            raise place.error(f"reads {name}{whose}, which nothing was written to")
        if self._homes is not None and cells[0] < self._inputs[owner]:
            self._check_not_overwritten(event, action, operand)
        return values

    def _check_not_overwritten(self, event: Event, action: Action, operand: Operand) -> None:
        """Check that INPUT can still be read in place: that OUTPUT there is not written yet, or to the same value."""
        assert self._homes is not None
        memory, homes = self._memory[operand.owner], self._homes[operand.owner]
        for cell in operand.cells:
            if memory[homes[cell]] not in (NOTHING, memory[cell]):
                plan = self._programs[operand.owner].plan
                raise self._place(event, action).error(
                    f"reads {cell_name(plan, cell)}, which in place has become {cell_name(plan, homes[cell])} before"
                )

    def _write(self, event: Event, action: Action, operands: Sequence[list[int]], sources: Sequence[Operand]) -> None:
        """Combine the operands, block by block, lower the results if that is said, and write them."""
        target, step = action.writes[0], action.step
        memory = self._memory[target.owner]
        try:
            results = operands[0]
            if len(operands) > 1:
                results = [self._values.combine(together) for together in zip(*operands, strict=True)]
            if isinstance(step, (RecvReduce, Copy, Reduce, ReadReduce)) and step.lower:
                results = [self._values.lower(result) for result in results]
        except _RefusedError as error:
            raise self._place(event, action).error(error.problem, error.picture) from None
        for source in sources:
            if source.lengths != target.lengths:
                raise self._other_length(event, action, target, source)
        for cell, result in zip(target.cells, results, strict=True):
            memory[cell] = result

    def _other_length(self, event: Event, action: Action, target: Operand, source: Operand) -> PlanError:
        """Return the error that names the first blocks of two operands whose lengths may differ."""
        differ = [one != other for one, other in zip(target.lengths, source.lengths, strict=True)].index(True)
        to, of = target.cells[differ], source.cells[differ]
        written = f"{cell_name(self._programs[source.owner].plan, of)} of rank {source.owner}"
        over = f"{cell_name(self._programs[target.owner].plan, to)} of rank {target.owner}"
        return self._place(event, action).error(f"writes {written} to {over}, which may be of another length")

    def _place(self, event: Event, action: Action) -> Place:
        """Return the place of a step that takes part in an event."""
        receiving = isinstance(event, Delivered) and action is event.receiving
        rank = event.rank if isinstance(event, Posted) else event.receiver if receiving else event.sender
        return self._programs[rank].place(event.lane, event.group, action)

    def _error(self, rank: int, block: int, problem: str) -> PlanError:
        """Return an error about a block of OUTPUT, which names the step that wrote it last and shows all ranks'."""
        promise = self._family.promise(rank, block)
        rows = {
            f"rank {other}": (self._values[number].ranks, promise.ranks)
            for other, of_other, number in self._outputs()
            if of_other == block and self._family.promise(other, block) == promise
        }
        picture = contributions(f"contributions to block {block} of OUTPUT, by rank", rows, self._family.size)
        return self._last_writer(rank, block).error(problem, picture)

    def _last_writer(self, rank: int, block: int) -> Place:
        cell = first_cell(self._programs[rank].plan, Buffer.OUTPUT) + block
        for event in reversed(self._events):
            if isinstance(event, Posted):
                candidates = self._programs[event.rank].lanes[event.lane][event.group].alone
            else:
                candidates = (event.receiving,)
            for action in candidates:
                if any(write.owner == rank and cell in write.cells for write in action.writes):
                    return self._place(event, action)
        raise AssertionError("a block that holds something was written")


def describe(origin: Origin) -> str:
    """Return what data is called in errors."""
    return f"block {origin.block}" + ("" if origin.rank < 0 else f" of rank {origin.rank}")


def lowest(ranks: int) -> int:
    """Return the lowest rank of a set of ranks that is not empty."""
    return (ranks & -ranks).bit_length() - 1
