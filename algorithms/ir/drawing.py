"""Schedules as text and as arrows: the plans of some ranks side by side, one row for each group as run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

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
_LETTERS = {Buffer.INPUT: "i", Buffer.OUTPUT: "o", Buffer.SCRATCH: "s"}


class Row(NamedTuple):
    """One row of a schedule: an instance of a group, with the steps of each plan, in the order of the plans."""

    lane: int
    group: int
    segment: int
    groups: tuple[Group, ...]


class Move(NamedTuple):
    """Data that goes from rank `source` to rank `target`. `combines`: the target combines it with other data."""

    source: int
    target: int
    combines: bool


def rows(plans: Sequence[Plan], segments: int = 1) -> list[Row]:
    """Return the rows of a schedule: `plans` of one algorithm run over `segments` segments, in canonical order."""
    lanes = [[list(plan.groups(lane)) for plan in plans] for lane in range(max(len(plan.lanes) for plan in plans))]
    instances = [
        (group + segment, segment, lane, group)
        for lane, of_plans in enumerate(lanes)
        for group in range(max(map(len, of_plans)))
        for segment in range(segments)
    ]
    return [
        Row(lane, group, segment, tuple(_at(groups, group) for groups in lanes[lane]))
        for _, segment, lane, group in sorted(instances)
    ]


def legend(schedule: Sequence[Row]) -> list[str]:
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


def moves(plans: Sequence[Plan], row: Row) -> list[Move]:
    """Return the moves in one row of `rows(plans)`. A move whose two ends are both among `plans` is returned once."""
    combining: dict[tuple[int, int], bool] = {}
    for plan, group in zip(plans, row.groups, strict=True):
        for step in group.steps:
            for move in _MOVES.get(type(step), _nothing)(step, plan.rank):
                already = combining.get((move.source, move.target), False)
                combining[move.source, move.target] = already or move.combines
    return [Move(source, target, combines) for (source, target), combines in combining.items()]


def _nothing(step: Any, rank: int) -> list[Move]:
    return []


_MOVES: dict[type, Callable[[Any, int], list[Move]]] = {
    Send: lambda step, rank: [Move(rank, step.peer, False)],
    Recv: lambda step, rank: [Move(step.peer, rank, False)],
    RecvReduce: lambda step, rank: [Move(step.peer, rank, True)],
    Read: lambda step, rank: [Move(step.peer, rank, False)],
    ReadReduce: lambda step, rank: [Move(peer, rank, True) for peer, _ in step.sources if peer != rank],
    Write: lambda step, rank: [Move(rank, step.peer, False)],
}
