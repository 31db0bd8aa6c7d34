"""Programs: plans unrolled for analysis, with a name for every step and a check that each makes sense on its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from unisono.algorithms.contracts import Cell
from unisono.algorithms.plan import (
    Buffer,
    Copy,
    Group,
    LocalStep,
    MessageStep,
    Plan,
    Recv,
    RecvReduce,
    Reduce,
    Send,
    Span,
    Step,
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

    def error(self, problem: str) -> PlanError:
        """Return the error that says what is wrong here."""
        return PlanError(f"{self}: {problem}")


@dataclass(frozen=True, slots=True)
class Program:
    """A plan with its lanes unrolled: `lanes[lane][group]`, groups as run."""

    plan: Plan
    lanes: tuple[tuple[Group, ...], ...]

    def steps(self) -> Iterator[tuple[Place, Step]]:
        """Yield every step with its place."""
        for lane, groups in enumerate(self.lanes):
            for number, group in enumerate(groups):
                for index, step in enumerate(group.steps):
                    yield Place(self.plan.rank, lane, number, index), step

    def cells(self, span: Span) -> list[Cell]:
        """Return the cells of `span`."""
        return [(span.buffer, block) for block in self.plan.physical_blocks(span)]

    def predecessors(self, lane: int, group: int) -> list[tuple[int, int]]:
        """Return the (lane, group) of the groups that must have ended before this group starts, in its segment."""
        return [*self.lanes[lane][group].after, *([(lane, group - 1)] if group else [])]


def unroll(plan: Plan) -> Program:
    """Return the program of `plan`.

    Raises:
        PlanError: a step is none that can be analysed (mapped memory is not), or makes no sense whatever the other
            ranks do: it names a rank or blocks that do not exist, or writes INPUT.
    """
    program = Program(plan, tuple(tuple(plan.groups(lane)) for lane in range(len(plan.lanes))))
    _check_permutation(plan)
    for place, step in program.steps():
        _check_step(program, place, step)
    for lane, groups in enumerate(program.lanes):
        for number, group in enumerate(groups):
            _check_group(program, Place(plan.rank, lane, number, 0), group)
    return program


def sources(step: Step) -> tuple[Span, ...]:
    """Return what a message or local step reads of its own rank's memory."""
    if isinstance(step, (Send, RecvReduce, Copy)):
        return (step.src,)
    return step.sources if isinstance(step, Reduce) else ()


def destinations(step: Step) -> tuple[Span, ...]:
    """Return what a message or local step writes: one span, or none."""
    return (step.dst,) if isinstance(step, (Recv, RecvReduce, Copy, Reduce)) else ()


def _check_permutation(plan: Plan) -> None:
    if sorted(plan.permutation) != list(range(len(plan.permutation))):
        raise PlanError(f"rank {plan.rank}: the permutation does not name every block once")


def _check_step(program: Program, place: Place, step: Step) -> None:
    if not isinstance(step, (MessageStep, LocalStep)):
        raise place.error(f"{type(step).__name__} needs mapped memory, which the verifier does not know yet")
    if isinstance(step, MessageStep) and (step.peer == place.rank or not 0 <= step.peer < program.plan.size):
        raise place.error(f"rank {step.peer} cannot be the peer of rank {place.rank} of {program.plan.size}")
    if isinstance(step, Reduce) and not step.sources:
        raise place.error("reduces nothing")
    spans = (*sources(step), *destinations(step))
    for span in spans:
        blocks = program.plan.partition(span.buffer).blocks
        if not 0 < span.count <= blocks or len(set(span.blocks(blocks))) < span.count:
            raise place.error(f"{span} does not name different blocks of the {blocks} of {span.buffer.name}")
    if len({span.count for span in spans}) > 1:
        raise place.error(f"operands have {' and '.join(str(span.count) for span in spans)} blocks")
    if any(span.buffer is Buffer.INPUT for span in destinations(step)):
        raise place.error("writes INPUT")


def _check_group(program: Program, place: Place, group: Group) -> None:
    counted = Counter((step.peer, isinstance(step, Send)) for step in group.steps if isinstance(step, MessageStep))
    for (peer, sent), times in counted.items():
        if times > 1:
            direction = "sends to" if sent else "receives from"
            raise place.error(f"the group {direction} rank {peer} {times} times; one message is all it may")
    for lane, number in group.after:
        if lane == place.lane or not 0 <= lane < len(program.lanes) or not 0 <= number < len(program.lanes[lane]):
            raise place.error(f"the group comes after group {number} of lane {lane}, which is not in another lane")
