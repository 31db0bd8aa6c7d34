"""Which memory of a rank its peers read. Only this memory must lie where peers can map it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unisono.algorithms.ir.plan import Buffer, Plan, Span
from unisono.algorithms.ir.walk import reads, steps_as_run


class ExposedRead(NamedTuple):
    """One read: rank `reader` reads `span` of the memory of rank `owner`."""

    reader: int
    owner: int
    span: Span


def readings(plans: Sequence[Plan]) -> list[ExposedRead]:
    """Return all reads of other ranks' memory. `plans` has the plans of all ranks, in the order of ranks."""
    return [
        ExposedRead(plan.rank, owner, span)
        for plan in plans
        for _, _, step in steps_as_run(plan)
        for owner, span in reads(step, plan.rank)
        if owner != plan.rank
    ]


def exposed_blocks(plans: Sequence[Plan]) -> list[frozenset[tuple[Buffer, int]]]:
    """Return for each rank the blocks of its memory that other ranks read, as (buffer, index in memory)."""
    exposed: list[set[tuple[Buffer, int]]] = [set() for _ in plans]
    for _, owner, span in readings(plans):
        exposed[owner].update((span.buffer, block) for block in plans[owner].physical_blocks(span))
    return [frozenset(blocks) for blocks in exposed]
