"""What ranks read of each other's memory: that must lie where the others can map it, and nothing else need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from unisono.algorithms.ir.plan import Buffer, Plan, Read, ReadReduce, Span, Step


class Reading(NamedTuple):
    """A span of the memory of rank `owner`, which rank `reader` reads once."""

    reader: int
    owner: int
    span: Span


def readings(plans: Sequence[Plan]) -> list[Reading]:
    """Return what the plans of all ranks, in their order, read of other ranks' memory."""
    return [
        Reading(plan.rank, owner, span)
        for plan in plans
        for lane in range(len(plan.lanes))
        for group in plan.groups(lane)
        for step in group.steps
        for owner, span in _read_by(step)
        if owner != plan.rank
    ]


def exposed_blocks(plans: Sequence[Plan]) -> list[frozenset[tuple[Buffer, int]]]:
    """Return by rank the blocks of its memory that other ranks read: the buffer, and the index in memory."""
    found: list[set[tuple[Buffer, int]]] = [set() for _ in plans]
    for _, owner, span in readings(plans):
        found[owner].update((span.buffer, block) for block in plans[owner].physical_blocks(span))
    return [frozenset(blocks) for blocks in found]


def _read_by(step: Step) -> Iterator[tuple[int, Span]]:
    if isinstance(step, Read):
        yield step.peer, step.src
    elif isinstance(step, ReadReduce):
        yield from step.sources
