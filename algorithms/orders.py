"""The order in which contributions are combined, derived from the plans of all ranks and compared with the declaration.

Two algorithms that combine by the same expression give the same bits. An expression is known by a number: that of a
contribution is its rank, that of a combination is negative, and equal combinations have equal numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import TypeAlias

from unisono.algorithms.algorithm import Algorithm
from unisono.algorithms.contracts import CONTRACTS, Family
from unisono.algorithms.plan import Buffer, Plan, RecvReduce, Wait
from unisono.algorithms.program import REDUCING, Action, Operand, first_cell, unroll
from unisono.algorithms.progress import Delivered, run
from unisono.errors import PlanError

_Combine: TypeAlias = Callable[[Sequence[int]], int]


class Expressions:
    """All combinations that occur, by number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}
        self._operands: list[tuple[int, ...]] = []

    def together(self, operands: Sequence[int]) -> int:
        """Return the combination of all operands at once, in this order."""
        found = tuple(operands)
        if found not in self._numbers:
            self._operands.append(found)
            self._numbers[found] = -len(self._operands)
        return self._numbers[found]

    def in_sequence(self, operands: Sequence[int]) -> int:
        """Return the combination of the operands one after the other, as one of all at once computes it."""
        return reduce(lambda sofar, operand: self.together((sofar, operand)), operands)

    def in_pairs(self, operands: Sequence[int]) -> int:
        """Return the combination of neighbours in pairs, then of neighbouring pairs, and so on."""
        level = list(operands)
        while len(level) > 1:
            pairs = [level[index : index + 2] for index in range(0, len(level), 2)]
            level = [self.together(pair) if len(pair) == 2 else pair[0] for pair in pairs]
        return level[0]

    def text(self, number: int) -> str:
        """Return an expression as people write it.

        >>> expressions = Expressions()
        >>> expressions.text(expressions.in_pairs([0, 1, 2])), expressions.text(expressions.in_sequence([0, 1, 2]))
        ('(0∘1)∘2', '(0∘1)∘2')
        >>> expressions.text(expressions.in_pairs([4, 5, 6, 7])), expressions.text(expressions.together([0, 1, 2]))
        ('(4∘5)∘(6∘7)', '0∘1∘2')
        """
        if number >= 0:
            return str(number)
        parts = self._operands[-number - 1]
        return "∘".join(f"({self.text(part)})" if part < 0 else str(part) for part in parts)


def check_order(algorithm: Algorithm, size: int) -> None:
    """Check that `algorithm` combines in the order that it declares, on `size` ranks, which it must support.

    Its plans must have been proved. The order "fixed" promises nothing that plans could break.

    Raises:
        PlanError: it combines in another order; shows the first result that is.
    """
    if algorithm.order not in ("rank", "canonical"):
        return
    roots = {0, size // 2, size - 1} if CONTRACTS[algorithm.collective].output_at_root else {0}
    for root in sorted(roots):
        for form in ({}, {"varying": True}) if algorithm.varying else ({},):
            _check(algorithm.order, [algorithm.build(size, rank, root, **form) for rank in range(size)])


def _check(order: str, plans: Sequence[Plan]) -> None:
    family, expressions = Family(plans), Expressions()
    # Combined all at once or one after the other: the elements meet in the same order.
    combine: _Combine = expressions.in_sequence if order == "rank" else expressions.together
    declared: _Combine = expressions.in_sequence if order == "rank" else expressions.in_pairs
    memory = _evaluate(family, combine)
    for plan in plans:
        first = first_cell(plan, Buffer.OUTPUT)
        for block in range(plan.output.blocks):
            ranks = family.promise(plan.rank, block).ranks
            if not ranks:
                continue
            expected = declared([rank for rank in range(family.size) if ranks >> rank & 1])
            found = memory[plan.rank][first + block]
            if found != expected:
                name = f"rank {plan.rank}: block {block} of OUTPUT is {expressions.text(found)}"
                raise PlanError(f"{name}, and in the order {order!r} it is {expressions.text(expected)}")


def _evaluate(family: Family, combine: _Combine) -> list[dict[int, int]]:
    """Return the expression in every cell of every rank that something has been written to, when all have ended."""
    programs = unroll(family.plans, family.length_numbers())
    memory = [dict.fromkeys(range(plan.input.blocks), plan.rank) for plan in family.plans]

    def read(operand: Operand) -> list[int]:
        return [memory[operand.owner][cell] for cell in operand.cells]

    def write(action: Action, operands: Sequence[list[int]]) -> None:
        target = action.writes[0]
        combines = type(action.step) in REDUCING and len(operands) > 1
        results = [combine(together) for together in zip(*operands, strict=True)] if combines else operands[0]
        memory[target.owner].update(zip(target.cells, results, strict=True))

    for event in run(programs):
        if not isinstance(event, Delivered):
            for action in programs[event.rank].lanes[event.lane][event.group].alone:
                write(action, [read(operand) for operand in action.reads])
        elif not isinstance(event.receiving.step, Wait):
            sent, own = read(event.sending.reads[0]), [read(operand) for operand in event.receiving.reads]
            step = event.receiving.step
            received_last = isinstance(step, RecvReduce) and not step.received_first
            write(event.receiving, [*own, sent] if received_last else [sent, *own])
    return memory
