"""Schedules as text and as arrows: the plans of some ranks side by side, one row for each group as run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    Send,
    Signal,
    Span,
    Step,
    Wait,
    Write,
)

_LEGEND: dict[type, str] = {
    Send: "→1 o2: send o2 to rank 1",
    Recv: "←1 o2: receive o2 from rank 1",
    RecvReduce: "⊕1 o2=i2: set o2 to i2 ∘ m, where m is received from rank 1; ⊕1 o2: to o2 ∘ m; 1⊕ o2: to m ∘ o2",
    Copy: "o2=i2: copy i2 to o2",
    Reduce: "o2=i2∘s2: combine i2 and s2 into o2",
    Read: "o2=1.i2: copy i2 of rank 1, which is mapped, to o2",
    ReadReduce: "o2=0.i2∘1.i2: combine i2 of ranks 0 and 1, which is mapped, into o2",
    Write: "1.o2=i2: copy i2 to o2 of rank 1, which is mapped",
    Signal: "!1: raise a flag at rank 1",
    Wait: "?1: wait for the flag of rank 1",
}
_TWO_SIDED = (Send, Recv, RecvReduce, Signal, Wait)
_LETTERS = {Buffer.INPUT: "i", Buffer.OUTPUT: "o", Buffer.SCRATCH: "s"}


# A group of a rank in a segment, as (rank, lane, group, segment).
Instance: TypeAlias = tuple[int, int, int, int]


class DrawnGroup(NamedTuple):
    """One row of a schedule: an instance of a group, with the steps of each plan, in the order of the plans."""

    lane: int
    group: int
    segment: int
    groups: tuple[Group, ...]


class DrawnMove(NamedTuple):
    """Data that goes from rank `source` to rank `target`.

    Attributes:
        source, target: the two ranks.
        combines: the target combines the data with other data.
        data: the names of the spans, such as ``i0``, at the source if its plan is drawn, else at the target.
    """

    source: int
    target: int
    combines: bool
    data: str


def rows(plans: Sequence[Plan], segments: int = 1) -> list[DrawnGroup]:
    """Return the rows of a schedule: the groups of `plans` for each of `segments` segments, in the order of posting."""
    lanes = [[list(plan.groups(lane)) for plan in plans] for lane in range(max(len(plan.lanes) for plan in plans))]
    instances = [
        (group + segment, segment, lane, group)
        for lane, of_plans in enumerate(lanes)
        for group in range(max(map(len, of_plans)))
        for segment in range(segments)
    ]
    return [
        DrawnGroup(lane, group, segment, tuple(_at(groups, group) for groups in lanes[lane]))
        for _, segment, lane, group in sorted(instances)
    ]


def legend(schedule: Sequence[DrawnGroup]) -> list[str]:
    """Return the lines that explain the symbols in `schedule`: one line for each kind of step that occurs."""
    steps = [step for row in schedule for group in row.groups for step in group.steps]
    kinds = {type(step) for step in steps}
    lowered = ["↓: lowered to results"] if any(getattr(step, "lower", False) for step in steps) else []
    return ["i, o, s: INPUT, OUTPUT, SCRATCH", *(_LEGEND[kind] for kind in _LEGEND if kind in kinds), *lowered]


def _at(groups: Sequence[Group], number: int) -> Group:
    return groups[number] if number < len(groups) else Group(())


def lines(plan: Plan, group: Group) -> list[str]:
    """Return the lines of text for one group: the groups that it waits for, then its steps as `legend` explains."""
    waits = [f"after lane {lane}, {number}" for lane, number in group.after]
    return waits + [_line(plan, step) for step in group.steps]


def _line(plan: Plan, step: Step) -> str:
    text = _TEXTS[type(step)](step, lambda span: _text(plan, span))
    return f"{text}↓" if getattr(step, "lower", False) else text


def _text(plan: Plan, span: Span) -> str:
    """Return the name of a span, such as ``o2``.

    The span may lie in a peer's memory. Buffers of peers are cut like those of this rank; a buffer that this rank lacks
    is numbered without wrapping around.
    """
    has_buffer = plan.partition(span.buffer).blocks > 0
    blocks = plan.physical_blocks(span) if has_buffer else span.blocks(span.start + span.count * span.stride)
    return _LETTERS[span.buffer] + ranges(blocks)


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text, with each run of consecutive numbers written as a range.

    >>> ranges([6, 7, 0, 1, 4])
    '6-7,0-1,4'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


_Name = Callable[[Span], str]


def _receive_and_reduce(step: RecvReduce, name: _Name) -> str:
    sender = f"{step.peer}⊕" if step.received_first else f"⊕{step.peer}"
    return f"{sender} {name(step.dst)}" + ("" if step.dst == step.src else f"={name(step.src)}")


# Kind of step → function of (step, function that names spans) that returns the text of the step.
_TEXTS: dict[type, Callable[[Any, _Name], str]] = {
    Send: lambda step, name: f"→{step.peer} {name(step.src)}",
    Recv: lambda step, name: f"←{step.peer} {name(step.dst)}",
    RecvReduce: _receive_and_reduce,
    Copy: lambda step, name: f"{name(step.dst)}={name(step.src)}",
    Reduce: lambda step, name: f"{name(step.dst)}={'∘'.join(map(name, step.sources))}",
    Read: lambda step, name: f"{name(step.dst)}={step.peer}.{name(step.src)}",
    ReadReduce: lambda step, name: f"{name(step.dst)}={'∘'.join(f'{peer}.{name(src)}' for peer, src in step.sources)}",
    Write: lambda step, name: f"{step.peer}.{name(step.dst)}={name(step.src)}",
    Signal: lambda step, name: f"!{step.peer}",
    Wait: lambda step, name: f"?{step.peer}",
}


def moves(plans: Sequence[Plan], row: DrawnGroup) -> list[DrawnMove]:
    """Return the moves in one row of `rows(plans)`. A move whose two ends are both among `plans` is returned once."""
    of_pairs: dict[tuple[int, int], list[tuple[int, DrawnMove]]] = {}
    for plan, group in zip(plans, row.groups, strict=True):
        for step in group.steps:
            for move in _MOVES.get(type(step), _nothing)(step, plan):
                of_pairs.setdefault((move.source, move.target), []).append((plan.rank, move))
    return [_merged(described) for described in of_pairs.values()]


def _merged(described: Sequence[tuple[int, DrawnMove]]) -> DrawnMove:
    """Return one move for the steps between two ranks. Each step is described by the rank that has it in its plan."""
    source, target = described[0][1][:2]
    namer = source if any(rank == source for rank, _ in described) else target
    data = ",".join(move.data for rank, move in described if rank == namer)
    return DrawnMove(source, target, any(move.combines for _, move in described), data)


def _nothing(step: Any, plan: Plan) -> list[DrawnMove]:
    return []


_MOVES: dict[type, Callable[[Any, Plan], list[DrawnMove]]] = {
    Send: lambda step, plan: [DrawnMove(plan.rank, step.peer, False, _text(plan, step.src))],
    Recv: lambda step, plan: [DrawnMove(step.peer, plan.rank, False, _text(plan, step.dst))],
    RecvReduce: lambda step, plan: [DrawnMove(step.peer, plan.rank, True, _text(plan, step.dst))],
    Read: lambda step, plan: [DrawnMove(step.peer, plan.rank, False, _text(plan, step.src))],
    ReadReduce: lambda step, plan: [
        DrawnMove(peer, plan.rank, True, _text(plan, src)) for peer, src in step.sources if peer != plan.rank
    ],
    Write: lambda step, plan: [DrawnMove(plan.rank, step.peer, False, _text(plan, step.src))],
}


def local_steps(plan: Plan, group: Group) -> list[str]:
    """Return the texts of the steps of a group that use only the memory of the plan's own rank."""
    return [_line(plan, step) for step in group.steps if isinstance(step, (Copy, Reduce))]


def start_times(plans: Sequence[Plan], schedule: Sequence[DrawnGroup]) -> dict[Instance, int]:
    """Return for each instance of a group the time at which it starts if every step takes one unit of time.

    An instance starts when these have ended: the group before it in its lane, the segment before it, and the groups in
    `after`. It ends one unit after the ranks of all its messages have started theirs, or at once if it has no steps.
    Ranks that are not among `plans` are never waited for.

    Args:
        plans: the plans of the ranks to draw.
        schedule: ``rows(plans, segments)``.
    """
    groups = {(plan.rank, *row[:3]): row.groups[at] for row in schedule for at, plan in enumerate(plans)}
    before = {instance: _before(instance, group, groups) for instance, group in groups.items()}
    partners = {instance: _partners(instance, group, groups) for instance, group in groups.items()}
    started, pending, time = dict[Instance, int](), dict.fromkeys(groups), 0
    while pending:
        ready = [instance for instance in pending if not any(each in pending for each in before[instance])]
        started.update((instance, started.get(instance, time)) for instance in ready)
        empty = [instance for instance in ready if not groups[instance].steps]
        for instance in empty or [each for each in ready if all(map(started.__contains__, partners[each]))]:
            del pending[instance]
        time += not empty
    return started


def _before(instance: Instance, group: Group, groups: Mapping[Instance, Group]) -> list[Instance]:
    rank, lane, number, segment = instance
    named = [(lane, number - 1), *group.after]
    earlier = [(rank, *place, segment) for place in named] + [(rank, lane, number, segment - 1)]
    return [each for each in earlier if each in groups]


def _partners(instance: Instance, group: Group, groups: Mapping[Instance, Group]) -> list[Instance]:
    of_peers = [(step.peer, *instance[1:]) for step in group.steps if isinstance(step, _TWO_SIDED)]
    return [each for each in of_peers if each in groups]
