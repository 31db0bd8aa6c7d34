"""Symbolic execution: which contributions every block holds at the end, without computing with numbers.

The value of a block is (origin, ranks, lowered): the data that it is about, the ranks whose contributions it holds, and
whether it is a final result. `ranks` is an integer in which bit r stands for rank r. Only values of the same origin and
of disjoint sets of ranks may be combined. So a value that holds all ranks holds each of them exactly once.

Each value has a number, and equal expressions have equal numbers. So each combination is checked only once, however
often it occurs, and the memory of a rank is a list of small integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unisono.algorithms.ir.plan import Buffer, Plan, RecvReduce, Wait
from unisono.algorithms.verifier.block_meaning import BlockOrigin, BlockPromise, PlanSet
from unisono.algorithms.verifier.error_pictures import contributions
from unisono.algorithms.verifier.progress import Delivered, Event, GroupPosted
from unisono.algorithms.verifier.unrolled import Action, Cells, StepLocation, UnrolledPlan, cell_name, first_cell
from unisono.errors import PlanError

UNWRITTEN = 0  # the number of the value of a block to which nothing has been written


class _RefusedError(Exception):
    """The reason why values cannot be combined, lowered or moved, with a picture. The caller adds the location."""

    def __init__(self, problem: str, picture: str = "") -> None:
        super().__init__(problem)
        self.problem, self.picture = problem, picture


class Values:
    """All values of an execution. The lists `origins`, `ranks` and `lowered` are indexed by the number of a value.

    `commutative` says whether operands may change places.
    """

    def __init__(self, size: int, *, commutative: bool) -> None:
        self.origins = [BlockOrigin(0, 0)]
        self.ranks = [0]
        self.lowered = [False]
        self.combined: dict[tuple[int, ...], int] = {}  # operands → number of their combination
        self._size = size
        self._commutative = commutative
        self._results: dict[int, int] = {}

    def contributions(self, origins: Sequence[BlockOrigin], rank: int) -> list[int]:
        """Return the values of the blocks of a rank's INPUT, one for each origin."""
        first = len(self.origins)
        self.origins += origins
        self.ranks += [1 << rank] * len(origins)
        self.lowered += [False] * len(origins)
        return list(range(first, len(self.origins)))

    def combine(self, operands: tuple[int, ...]) -> int:
        """Return the combination of the operands in this order. Callers look it up in `combined` first."""
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
        # Two operands give the same bits in either order. Three or more do not: they are combined in their order.
        swapped = self.combined.get(operands[::-1]) if len(operands) == 2 else None
        number = self._add(origin, ranks, lowered=False) if swapped is None else swapped
        self.combined[operands] = number
        return number

    def lower(self, number: int) -> int:
        """Return the lowered value."""
        if self.lowered[number]:
            raise _RefusedError(f"lowers {describe(self.origins[number])} a second time")
        if number not in self._results:
            self._results[number] = self._add(self.origins[number], self.ranks[number], lowered=True)
        return self._results[number]

    def _add(self, origin: BlockOrigin, ranks: int, *, lowered: bool) -> int:
        self.origins.append(origin)
        self.ranks.append(ranks)
        self.lowered.append(lowered)
        return len(self.origins) - 1

    def _refusal(self, origin: BlockOrigin, ranks: int, operand: int) -> _RefusedError:
        """Return the error: the reason why `operand` cannot be combined with a value that holds `ranks` of `origin`."""
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
    """One symbolic execution of the plans of all ranks.

    Args:
        plan_set: the meaning of the blocks of the plans.
        unrolled_plans: the unrolled plan of each rank, in order.
        events: the events in a possible order. If the plans are free of hazards, every order gives the same values.
        in_place: whether the execution must give the same values with INPUT and OUTPUT as the same memory.
        commutative: whether operands may change places. If not, only neighbouring runs of ranks combine, in their
            order.

    Raises:
        PlanError: a step reads a block that was never written or that is overwritten in place, combines values that
            must not be combined, lowers a value twice, or writes to a block of another length. Or, in `check`, the
            result is not what the collective promises.
    """

    def __init__(
        self,
        plan_set: PlanSet,
        unrolled_plans: Sequence[UnrolledPlan],
        events: Sequence[Event],
        *,
        in_place: bool,
        commutative: bool,
    ) -> None:
        self._plan_set = plan_set
        self._unrolled_plans = unrolled_plans
        self._events = events
        self._values = Values(plan_set.size, commutative=commutative)
        self._homes = [plan_set.homes(rank) for rank in range(plan_set.size)] if in_place else None
        self._inputs = [unrolled.plan.input.blocks for unrolled in unrolled_plans]
        self._memory = [self._at_the_start(unrolled.plan) for unrolled in unrolled_plans]
        for event in events:
            if isinstance(event, GroupPosted):
                self._post(event)
            elif type(event.receiving.step) is not Wait:
                self._deliver(event)

    def check(self) -> bool:
        """Check that every rank's OUTPUT holds the data that the collective promises.

        Return whether ranks that are promised the same result compute it by the same expression.
        """
        values, reduces, same = self._values, self._plan_set.contract.reduces, True
        expressions: dict[BlockPromise, int] = {}
        for rank, block, number in self._outputs():
            promise = self._plan_set.promise(rank, block)
            origin, ranks = promise
            if values.ranks[number] != ranks or (
                ranks and (values.origins[number] != origin or values.lowered[number] != reduces)
            ):
                raise self._broken(rank, block, number, promise)
            same = same and expressions.setdefault(promise, number) == number
        return same

    def _broken(self, rank: int, block: int, number: int, promise: BlockPromise) -> PlanError:
        """Return the error for a block of OUTPUT that holds value `number` instead of the promised one."""
        name, origin = f"block {block} of OUTPUT", self._values.origins[number]
        ranks, lowered = self._values.ranks[number], self._values.lowered[number]
        if number == UNWRITTEN:
            return PlanError(f"rank {rank}: {name} is never written")
        if not promise.ranks:
            problem = f"{name} is written, but no step may write it"
        elif origin != promise.origin:
            problem = f"{name} holds {describe(origin)}, not {describe(promise.origin)}"
        elif missing := promise.ranks & ~ranks:
            problem = f"{name} lacks the contribution of rank {lowest(missing)}"
        elif surplus := ranks & ~promise.ranks:
            problem = f"{name} has the contribution of rank {lowest(surplus)}, which does not belong there"
        elif lowered:
            problem = f"{name} is lowered, but this collective combines nothing: remove lower=True from its steps"
        else:
            problem = f"{name} is complete, but not lowered: add lower=True to the step that completes it"
        return self._error(rank, block, problem)

    def _at_the_start(self, plan: Plan) -> list[int]:
        """Return the memory of a rank before its first step."""
        empty = [UNWRITTEN] * (plan.output.blocks + plan.scratch.blocks)
        return self._values.contributions(self._plan_set.origins(plan.rank), plan.rank) + empty

    def _outputs(self) -> Iterator[tuple[int, int, int]]:
        """Yield (rank, block, value) of every block of OUTPUT."""
        for unrolled in self._unrolled_plans:
            plan = unrolled.plan
            first = first_cell(plan, Buffer.OUTPUT)
            for block in range(plan.output.blocks):
                yield plan.rank, block, self._memory[plan.rank][first + block]

    def _post(self, event: GroupPosted) -> None:
        rank, lane, group = event
        for action in self._unrolled_plans[rank].lanes[lane][group].unpaired:
            operands = [self._read(event, action, read) for read in action.reads]
            self._write(event, action, operands, action.reads)

    def _deliver(self, event: Delivered) -> None:
        sending, receiving = event.sending, event.receiving
        source, target, step = sending.reads[0], receiving.writes[0], receiving.step
        sent = self._read(event, sending, source)
        if len(sent) != len(target.cells):
            raise self._location(event, receiving).error(
                f"receives {len(target.cells)} blocks of the {len(sent)} that are sent"
            )
        if type(step) is RecvReduce:
            local = receiving.reads[0]
            local_values = self._read(event, receiving, local)
            operands = (sent, local_values) if step.received_first else (local_values, sent)
            self._write(event, receiving, operands, (source, local))
        else:
            self._write(event, receiving, (sent,), (source,))

    def _read(self, event: Event, action: Action, operand: Cells) -> list[int]:
        owner, cells, _ = operand
        memory = self._memory[owner]
        values = [memory[cell] for cell in cells] if len(cells) > 1 else [memory[cells[0]]]
        if UNWRITTEN in values:
            name = cell_name(self._unrolled_plans[owner].plan, cells[values.index(UNWRITTEN)])
            location = self._location(event, action)
            whose = "" if owner == location.rank else f" of rank {owner}"
            raise location.error(f"reads {name}{whose}, to which nothing has been written")
        if self._homes is not None and cells[0] < self._inputs[owner]:
            self._check_not_overwritten(event, action, operand)
        return values

    def _check_not_overwritten(self, event: Event, action: Action, operand: Cells) -> None:
        """Check that INPUT can be read in place: OUTPUT there is not written yet, or holds the same value."""
        assert self._homes is not None
        memory, homes = self._memory[operand.owner], self._homes[operand.owner]
        for cell in operand.cells:
            if memory[homes[cell]] not in (UNWRITTEN, memory[cell]):
                plan = self._unrolled_plans[operand.owner].plan
                raise self._location(event, action).error(
                    f"reads {cell_name(plan, cell)}, which in place has been overwritten as "
                    f"{cell_name(plan, homes[cell])}"
                )

    def _write(self, event: Event, action: Action, operands: Sequence[list[int]], sources: Sequence[Cells]) -> None:
        """Combine the operands block by block, lower the results if the step says so, and write them."""
        target, results = action.writes[0], operands[0]
        try:
            if len(operands) > 1:
                look_up, combine = self._values.combined.get, self._values.combine
                results = [look_up(values) or combine(values) for values in zip(*operands, strict=True)]
            if getattr(action.step, "lower", False):
                results = [self._values.lower(result) for result in results]
        except _RefusedError as error:
            raise self._location(event, action).error(error.problem, error.picture) from None
        for source in sources:
            if source.lengths != target.lengths:
                raise self._other_length(event, action, target, source)
        memory = self._memory[target.owner]
        for cell, result in zip(target.cells, results, strict=True):
            memory[cell] = result

    def _other_length(self, event: Event, action: Action, target: Cells, source: Cells) -> PlanError:
        """Return the error that names the first two blocks of two operands whose lengths may differ."""
        differ = [one != other for one, other in zip(target.lengths, source.lengths, strict=True)].index(True)
        source_name = (
            f"{cell_name(self._unrolled_plans[source.owner].plan, source.cells[differ])} of rank {source.owner}"
        )
        target_name = (
            f"{cell_name(self._unrolled_plans[target.owner].plan, target.cells[differ])} of rank {target.owner}"
        )
        return self._location(event, action).error(
            f"writes {source_name} to {target_name}, which may have a different length"
        )

    def _location(self, event: Event, action: Action) -> StepLocation:
        """Return the location of a step that takes part in an event."""
        receiving = isinstance(event, Delivered) and action is event.receiving
        rank = event.rank if isinstance(event, GroupPosted) else event.receiver if receiving else event.sender
        return self._unrolled_plans[rank].location(event.lane, event.group, action)

    def _error(self, rank: int, block: int, problem: str) -> PlanError:
        """Return an error about a block of OUTPUT; it names the step that wrote it last and shows all ranks."""
        promise = self._plan_set.promise(rank, block)
        rows = {
            f"rank {other}": (self._values.ranks[number], promise.ranks)
            for other, of_other, number in self._outputs()
            if of_other == block and self._plan_set.promise(other, block) == promise
        }
        picture = contributions(f"contributions to block {block} of OUTPUT, by rank", rows, self._plan_set.size)
        return self._last_writer(rank, block).error(problem, picture)

    def _last_writer(self, rank: int, block: int) -> StepLocation:
        cell = first_cell(self._unrolled_plans[rank].plan, Buffer.OUTPUT) + block
        for event in reversed(self._events):
            if isinstance(event, GroupPosted):
                candidates = self._unrolled_plans[event.rank].lanes[event.lane][event.group].unpaired
            else:
                candidates = (event.receiving,)
            for action in candidates:
                if any(write.owner == rank and cell in write.cells for write in action.writes):
                    return self._location(event, action)
        raise AssertionError("a block that holds something was written")


def describe(origin: BlockOrigin) -> str:
    """Return the name of data for errors, such as "block 2 of rank 1"."""
    return f"block {origin.block}" + ("" if origin.rank < 0 else f" of rank {origin.rank}")


def lowest(ranks: int) -> int:
    """Return the lowest rank of a non-empty set of ranks."""
    return (ranks & -ranks).bit_length() - 1
