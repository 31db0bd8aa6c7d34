"""Binding a plan's blocks to elements: pure integer functions that every executor follows to the letter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from unisono.algorithms.ir.plan import Buffer, Counts, Partition, Plan, Span
from unisono.records import record


@record
class Shape:
    """The element counts of one call on one rank.

    Attributes:
        elements: number of elements of INPUT and of OUTPUT, for partitions by `Counts.OWN`.
        counts: for each other kind of `Counts`, the list of counts.
    """

    elements: tuple[int, int]
    counts: dict[Counts, Sequence[int]]


def split(length: int, parts: int, part: int) -> tuple[int, int]:
    """Return (offset, length) of one of `parts` near-equal parts; the first (length mod parts) are one longer."""
    quotient, remainder = divmod(length, parts)
    return part * quotient + min(part, remainder), quotient + (part < remainder)


def bounds(plan: Plan, buffer: Buffer, shape: Shape) -> list[tuple[int, int]]:
    """Return (offset, length) in elements of each block of `buffer`, by index in memory."""
    partition = plan.partition(buffer)
    if partition.blocks == 0:
        return []
    if partition.like is not None:
        return _copies(bounds(plan, partition.like, shape), partition)
    if partition.counts is Counts.OWN:
        elements = shape.elements[buffer]
        return [split(elements, partition.blocks, block) for block in range(partition.blocks)]
    lengths = shape.counts[partition.counts]
    return list(zip(accumulate(lengths, initial=0), lengths, strict=False))


def _copies(original: list[tuple[int, int]], partition: Partition) -> list[tuple[int, int]]:
    if partition.block is not None:
        original = [(0, original[partition.block][1])]
    whole = sum(length for _, length in original)
    return [(copy * whole + offset, length) for copy in range(partition.copies) for offset, length in original]


def pieces(
    plan: Plan, span: Span, block_bounds: Sequence[tuple[int, int]], segment: int, segments: int
) -> list[tuple[int, int]]:
    """Return (offset, length) in elements of what `span` covers in a segment, by block, without empty pieces."""
    found = []
    for block in plan.physical_blocks(span):
        offset, length = block_bounds[block]
        start, part = split(length, segments, segment)
        if part:
            found.append((offset + start, part))
    return found
