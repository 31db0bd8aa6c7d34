"""The order in which contributions are combined: derives it from the plans of all ranks and checks the declaration.

Two algorithms that combine by the same expression give the same bits. An expression is a number: the number of a
contribution is its rank, the number of a combination is negative, and equal combinations have equal numbers. Values
that are combined in one step are rounded once. So this is a different expression from the same values combined in
several steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.ir.contracts import CONTRACTS
from unisono.algorithms.ir.plan import Buffer, Plan, RecvReduce, Wait
from unisono.algorithms.verifier.block_meaning import PlanSet
from unisono.algorithms.verifier.progress import Delivered, run
from unisono.algorithms.verifier.unrolled import Action, Cells, first_cell, unroll
from unisono.errors import PlanError


class Expressions:
    """The numbers of all combinations that occur."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}
        self._operands: list[tuple[int, ...]] = []

    def together(self, operands: Sequence[int]) -> int:
        """Return the combination of all operands in one step, in this order; of one operand, the operand itself."""
        return self._numbered(tuple(operands)) if len(operands) > 1 else operands[0]

    def lowered_apart(self, operand: int) -> int:
        """Return a combination that a later step lowers, which rounds once more, as the division of an average does."""
        return self._numbered((operand,))

    def in_sequence(self, operands: Sequence[int]) -> int:
        """Return the combination of the operands one after the other."""
        return reduce(lambda sofar, operand: self.together((sofar, operand)), operands)

    def in_pairs(self, operands: Sequence[int]) -> int:
        """Return the combination of neighbours in pairs, then of neighbouring pairs, and so on."""
        level = list(operands)
        while len(level) > 1:
            pairs = [level[index : index + 2] for index in range(0, len(level), 2)]
            level = [self.together(pair) for pair in pairs]
        return level[0]

    def text(self, number: int) -> str:
        """Return an expression as text.

        >>> expressions = Expressions()
        >>> expressions.text(expressions.in_pairs([0, 1, 2])), expressions.text(expressions.in_sequence([0, 1, 2]))
        ('(0∘1)∘2', '(0∘1)∘2')
        >>> expressions.text(expressions.in_pairs([4, 5, 6, 7])), expressions.text(expressions.together([0, 1, 2]))
        ('(4∘5)∘(6∘7)', '0∘1∘2')
        """
        if number >= 0:
            return str(number)
        parts = self._operands[-number - 1]
        text = "∘".join(f"({self.text(part)})" if part < 0 else str(part) for part in parts)
        return text if len(parts) > 1 else f"lowered {text}"

    def _numbered(self, operands: tuple[int, ...]) -> int:
        if operands not in self._numbers:
            self._operands.append(operands)
            self._numbers[operands] = -len(self._operands)
        return self._numbers[operands]


# Order → the expression of a result, for each order that is proved.
_EXPECTED: dict[str, Callable[[Expressions, Sequence[int]], int]] = {
    "rank": Expressions.in_sequence,
    "at_once": Expressions.together,
    "canonical": Expressions.in_pairs,
}


def check_order(algorithm: Algorithm, size: int) -> None:
    """Check that `algorithm` combines contributions in the order that it declares, on `size` ranks.

    The algorithm must support `size` ranks, and its plans must have been proved. The order "fixed" has nothing to
    check.

    Raises:
        PlanError: the order is another one; the message shows the first result that differs.
    """
    if algorithm.order not in _EXPECTED:
        return
    roots = {0, size // 2, size - 1} if CONTRACTS[algorithm.collective].output_at_root else {0}
    for root in sorted(roots):
        for form in ({}, {"varying": True}) if algorithm.varying else ({},):
            _check(algorithm.order, [algorithm.build(size, rank, root, **form) for rank in range(size)])


def _check(order: str, plans: Sequence[Plan]) -> None:
    plan_set, expressions = PlanSet(plans), Expressions()
    results = _results(plan_set, expressions)
    for plan in plans:
        for block, actual in results[plan.rank].items():
            ranks = plan_set.promise(plan.rank, block).ranks
            expected = _EXPECTED[order](expressions, [rank for rank in range(plan_set.size) if ranks >> rank & 1])
            if actual != expected:
                name = f"rank {plan.rank}: block {block} of OUTPUT is {expressions.text(actual)}"
                raise PlanError(f"{name}, but the declared order {order!r} demands {expressions.text(expected)}")


def combinations(plans: Sequence[Plan]) -> list[dict[int, str]]:
    """Return, for each rank, the expression of each block of OUTPUT that has contributions, as text.

    The plans are those of all ranks and have been proved.

    >>> from unisono.algorithms.builders.ring import allreduce_ring
    >>> combinations([allreduce_ring(3, rank) for rank in range(3)])[0]
    {0: '(0∘1)∘2', 1: '(1∘2)∘0', 2: '(2∘0)∘1'}
    """
    expressions = Expressions()
    results = _results(PlanSet(plans), expressions)
    return [{block: expressions.text(result) for block, result in of_rank.items()} for of_rank in results]


def _results(plan_set: PlanSet, expressions: Expressions) -> list[dict[int, int]]:
    """Return, for each rank, the expression of each block of OUTPUT that has contributions."""
    memory = _evaluate(plan_set, expressions)
    return [
        {
            block: memory[plan.rank][first_cell(plan, Buffer.OUTPUT) + block]
            for block in range(plan.output.blocks)
            if plan_set.promise(plan.rank, block).ranks
        }
        for plan in plan_set.plans
    ]


def _evaluate(plan_set: PlanSet, expressions: Expressions) -> list[dict[int, int]]:
    """Return, for each rank, the expression in every written cell after all ranks have ended."""
    unrolled_plans = unroll(plan_set.plans, plan_set.length_numbers())
    memory = [dict.fromkeys(range(plan.input.blocks), plan.rank) for plan in plan_set.plans]
    # Only the lowering of an average rounds, and scans have no average. In a scan, the promised ranks differ.
    lowering_rounds = len({plan_set.promise(plan.rank, 0).ranks for plan in plan_set.plans}) == 1

    def read(operand: Cells) -> list[int]:
        return [memory[operand.owner][cell] for cell in operand.cells]

    def write(action: Action, operands: Sequence[list[int]]) -> None:
        target = action.writes[0]
        results = [expressions.together(values) for values in zip(*operands, strict=True)]
        if lowering_rounds and len(operands) == 1 and getattr(action.step, "lower", False):
            results = [expressions.lowered_apart(result) if result < 0 else result for result in results]
        memory[target.owner].update(zip(target.cells, results, strict=True))

    for event in run(unrolled_plans):
        if not isinstance(event, Delivered):
            for action in unrolled_plans[event.rank].lanes[event.lane][event.group].unpaired:
                write(action, [read(operand) for operand in action.reads])
        elif not isinstance(event.receiving.step, Wait):
            sent, local = read(event.sending.reads[0]), [read(operand) for operand in event.receiving.reads]
            step = event.receiving.step
            received_last = isinstance(step, RecvReduce) and not step.received_first
            write(event.receiving, [*local, sent] if received_last else [sent, *local])
    return memory
