"""Symbolic execution: what every block holds at the end, as expressions over contributions instead of numbers.

The value of a block is (origin, ranks, lowered): which data it is about, whose contributions are in it (an integer with
bit r set if that of rank r is), and whether it is a result already. Only values of one origin and of disjoint ranks may
be combined, so that "contains all ranks" means "contains each exactly once".

A value is known by the number of the expression that computes it, and equal expressions have equal numbers, so each
combination is judged once, however often it is made, and memory is lists of small integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unisono.algorithms.ir.plan import Buffer, Plan, RecvReduce, Wait
from unisono.algorithms.verifier.block_meaning import Origin, PlanSet, Promise
from unisono.algorithms.verifier.error_pictures import contributions
from unisono.algorithms.verifier.progress import Delivered, Event, Posted
from unisono.algorithms.verifier.unrolled import Action, Operand, Place, UnrolledPlan, cell_name, first_cell
from unisono.errors import PlanError

NOTHING = 0  # the number of what a block holds before anything is written to it


class _RefusedError(Exception):
    """Why values cannot be combined, lowered or moved, before it is known where; and a picture of it."""

    def __init__(self, problem: str, picture: str = "") -> None:
        super().__init__(problem)
        self.problem, self.picture = problem, picture


class Values:
    """All values that occur: by number, their `origins`, their `ranks`, and whether they are `lowered`.

    `commutative` says whether operands may change places.
    """

    def __init__(self, size: int, *, commutative: bool) -> None:
        self.origins = [Origin(0, 0)]
        self.ranks = [0]
        self.lowered = [False]
        self.combined: dict[tuple[int, ...], int] = {}  # the numbers of combinations made before, by operands
        self._size = size
        self._commutative = commutative
        self._results: dict[int, int] = {}

    def contributions(self, origins: Sequence[Origin], rank: int) -> list[int]:
        """Return the values of blocks of the INPUT of a rank, of which each is about another origin."""
        first = len(self.origins)
        self.origins += origins
        self.ranks += [1 << rank] * len(origins)
        self.lowered += [False] * len(origins)
        return list(range(first, len(self.origins)))

    def combine(self, operands: tuple[int, ...]) -> int:
        """Return the combination of the operands, in this order, which is not one of those made before."""
        origin, ranks = self.origins[operands[0]], 0
        for operand in operands:
            of_operand = self.ranks[operand]
            if (
                ranks & of_operand
                or self.lowered[operand]
                or self.origins[operand] != origin
                or not (self._commutative or not ranks or ranks.bit_length() == lowest(of_operand))
            ):
                raise self._refusal(origin, ranks, operand)
            ranks |= of_operand
        # Two operands give the same bits in either order; more are combined in theirs and rounded once.
        turned = self.combined.get(operands[::-1]) if len(operands) == 2 else None
        number = self._add(origin, ranks, lowered=False) if turned is None else turned
        self.combined[operands] = number
        return number

    def lower(self, number: int) -> int:
        """Return the value lowered."""
        if self.lowered[number]:
            raise _RefusedError(f"lowers {describe(self.origins[number])} a second time")
        if number not in self._results:
            self._results[number] = self._add(self.origins[number], self.ranks[number], lowered=True)
        return self._results[number]

    def _add(self, origin: Origin, ranks: int, *, lowered: bool) -> int:
        self.origins.append(origin)
        self.ranks.append(ranks)
        self.lowered.append(lowered)
        return len(self.origins) - 1

    def _refusal(self, origin: Origin, ranks: int, operand: int) -> _RefusedError:
        """Return why a value cannot be combined with what has the contributions of `ranks` to `origin`."""
        others = self.ranks[operand]
        if self.origins[operand] != origin:
            return _RefusedError(f"combines {describe(self.origins[operand])} with {describe(origin)}")
        if self.lowered[operand]:
            return _RefusedError(f"combines a value of {describe(origin)} that is lowered already")
        if twice := ranks & others:
            problem = f"the contribution of rank {lowest(twice)} to {describe(origin)} is combined twice"
        else:
            problem = (
                f"rank {lowest(others)} follows rank {ranks.bit_length() - 1} in the combination of "
                f"{describe(origin)}: contributions must be combined in the order of ranks"
            )
        rows = {"so far": (ranks, ranks & ~twice), "combined with": (others, others & ~twice)}
        return _RefusedError(problem, contributions("contributions, by rank", rows, self._size))


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
        family: PlanSet,
        programs: Sequence[UnrolledPlan],
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
        self._memory = [self._at_the_start(program.plan) for program in programs]
        for event in events:
            if isinstance(event, Posted):
                self._post(event)
            elif type(event.receiving.step) is not Wait:
                self._deliver(event)

    def check(self) -> bool:
        """Check that every rank's OUTPUT holds what the collective promises.

        Return whether ranks that are promised the same compute it by the same expression.
        """
        values, reduces, same = self._values, self._family.contract.reduces, True
        expressions: dict[Promise, int] = {}
        for rank, block, number in self._outputs():
            promise = self._family.promise(rank, block)
            origin, ranks = promise
            if values.ranks[number] != ranks or (
                ranks and (values.origins[number] != origin or values.lowered[number] != reduces)
            ):
                raise self._broken(rank, block, number, promise)
            same = same and expressions.setdefault(promise, number) == number
        return same

    def _broken(self, rank: int, block: int, number: int, promise: Promise) -> PlanError:
        """Return how a block of OUTPUT that holds the value of this number breaks what is promised of it."""
        name, origin = f"block {block} of OUTPUT", self._values.origins[number]
        ranks, lowered = self._values.ranks[number], self._values.lowered[number]
        if number == NOTHING:
            return PlanError(f"rank {rank}: {name} is never written")
        if not promise.ranks:
            problem = f"{name} is written, and is to be left untouched"
        elif origin != promise.origin:
            problem = f"{name} holds {describe(origin)}, not {describe(promise.origin)}"
        elif missing := promise.ranks & ~ranks:
            problem = f"{name} is left without the contribution of rank {lowest(missing)}"
        elif surplus := ranks & ~promise.ranks:
            problem = f"{name} has the contribution of rank {lowest(surplus)} too many"
        elif lowered:
            problem = f"{name} is lowered, and this collective combines nothing: take lower=True out of its steps"
        else:
            problem = f"{name} is complete, but not lowered: give lower=True to the step that completes it"
        return self._error(rank, block, problem)

    def _at_the_start(self, plan: Plan) -> list[int]:
        """Return the memory of a rank before it has done anything."""
        empty = [NOTHING] * (plan.output.blocks + plan.scratch.blocks)
        return self._values.contributions(self._family.origins(plan.rank), plan.rank) + empty

    def _outputs(self) -> Iterator[tuple[int, int, int]]:
        """Yield (rank, block, value) of every block of OUTPUT."""
        for program in self._programs:
            plan = program.plan
            first = first_cell(plan, Buffer.OUTPUT)
            for block in range(plan.output.blocks):
                yield plan.rank, block, self._memory[plan.rank][first + block]

    def _post(self, event: Posted) -> None:
        rank, lane, group = event
        for action in self._programs[rank].lanes[lane][group].alone:
            operands = [self._read(event, action, read) for read in action.reads]
            self._write(event, action, operands, action.reads)

    def _deliver(self, event: Delivered) -> None:
        sending, receiving = event.sending, event.receiving
        source, target, step = sending.reads[0], receiving.writes[0], receiving.step
        sent = self._read(event, sending, source)
        if len(sent) != len(target.cells):
            raise self._place(event, receiving).error(
                f"receives {len(target.cells)} blocks of the {len(sent)} that are sent"
            )
        if type(step) is RecvReduce:
            of_rank = receiving.reads[0]
            own = self._read(event, receiving, of_rank)
            operands = (sent, own) if step.received_first else (own, sent)
            self._write(event, receiving, operands, (source, of_rank))
        else:
            self._write(event, receiving, (sent,), (source,))

    def _read(self, event: Event, action: Action, operand: Operand) -> list[int]:
        owner, cells, _ = operand
        memory = self._memory[owner]
        values = [memory[cell] for cell in cells] if len(cells) > 1 else [memory[cells[0]]]
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
        target, results = action.writes[0], operands[0]
        try:
            if len(operands) > 1:
                found, combine = self._values.combined.get, self._values.combine
                results = [found(together) or combine(together) for together in zip(*operands, strict=True)]
            if getattr(action.step, "lower", False):
                results = [self._values.lower(result) for result in results]
        except _RefusedError as error:
            raise self._place(event, action).error(error.problem, error.picture) from None
        for source in sources:
            if source.lengths != target.lengths:
                raise self._other_length(event, action, target, source)
        memory = self._memory[target.owner]
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
            f"rank {other}": (self._values.ranks[number], promise.ranks)
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
