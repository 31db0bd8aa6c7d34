"""One walk over a plan, for all that read plans: its groups as written, its steps as run, and the memory of a step.

>>> from unisono.algorithms.builders.ring import allgather_ring
>>> plan = allgather_ring(4, 0)
>>> [(lane, first, stride, times) for lane, first, stride, times, _ in walk(plan)]
[(0, 0, 1, 1), (0, 1, 1, 2)]
>>> [(lane, number, type(step).__name__) for lane, number, step in steps_as_run(plan)][:3]
[(0, 0, 'Send'), (0, 0, 'Recv'), (0, 0, 'Copy')]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from unisono.algorithms.ir.plan import (
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


class Written(NamedTuple):
    """A group as the plan contains it: it runs `times` times, as groups `first`, `first + stride`, … of its lane."""

    lane: int
    first: int
    stride: int
    times: int
    group: Group

    def numbers(self) -> range:
        """Return the numbers of its runs in the lane."""
        return range(self.first, self.first + self.times * self.stride, self.stride)


class StepAsRun(NamedTuple):
    """A step in one iteration, with its peer and its spans advanced, in group `number` of its lane."""

    lane: int
    number: int
    step: Step


def walk(plan: Plan) -> Iterator[Written]:
    """Yield the groups of a plan as written, lane by lane, in order. A group of an empty `Repeat` runs 0 times."""
    for lane, items in enumerate(plan.lanes):
        first = 0
        for item in items:
            times, groups = as_written(item)
            for offset, group in enumerate(groups):
                yield Written(lane, first + offset, len(groups), times, group)
            first += times * len(groups)


def steps_as_run(plan: Plan) -> Iterator[StepAsRun]:
    """Yield the steps of a plan as run, lane by lane, in order."""
    for lane in range(len(plan.lanes)):
        for number, group in enumerate(plan.groups(lane)):
            for step in group.steps:
                yield StepAsRun(lane, number, step)


# The spans of a step, each as (rank whose memory it is, span).
OwnedSpans: TypeAlias = Sequence[tuple[int, Span]]
_Spans: TypeAlias = Callable[[Any, int], OwnedSpans]


def _source(step: Any, rank: int) -> OwnedSpans:
    return ((rank, step.src),)


def _target(step: Any, rank: int) -> OwnedSpans:
    return ((rank, step.dst),)


def _nothing(step: Any, rank: int) -> OwnedSpans:
    return ()


# Kind of step → (the spans that it reads, the spans that it writes).
_SPANS: dict[type, tuple[_Spans, _Spans]] = {
    Send: (_source, _nothing),
    Recv: (_nothing, _target),
    RecvReduce: (_source, _target),
    Copy: (_source, _target),
    Reduce: (lambda step, rank: [(rank, span) for span in step.sources], _target),
    Read: (lambda step, rank: ((step.peer, step.src),), _target),
    ReadReduce: (lambda step, rank: step.sources, _target),
    Write: (_source, lambda step, rank: ((step.peer, step.dst),)),
    Signal: (_nothing, _nothing),
    Wait: (_nothing, _nothing),
}


def reads(step: Step, rank: int) -> OwnedSpans:
    """Return the spans that a step of `rank` reads. The payload of a received message is not among them."""
    return _SPANS[type(step)][0](step, rank)


def writes(step: Step, rank: int) -> OwnedSpans:
    """Return the spans that a step of `rank` writes.

    The spans that a message fills at its receiver are not among them.
    """
    return _SPANS[type(step)][1](step, rank)
