"""From blocks to elements: the offset and length of each block of a plan, once the element counts are known.

All functions are pure integer arithmetic. Every executor must compute the same numbers, because both ends of a message
derive its length from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from unisono.algorithms.ir.plan import Buffer, Counts, Partition, Plan, Span
from unisono.foundation.records import record


@record
class Shape:
    """The element counts of one call on one rank.

    Attributes:
        elements: the number of elements of INPUT and of OUTPUT, for partitions with `Counts.OWN`.
        counts: for each other kind of `Counts`, the list of counts.
    """

    elements: tuple[int, int]
    counts: dict[Counts, Sequence[int]]


def split(length: int, parts: int, part: int) -> tuple[int, int]:
    """Return (offset, length) of one of `parts` nearly equal parts. The first (length mod parts) are one longer."""
    quotient, remainder = divmod(length, parts)
    return part * quotient + min(part, remainder), quotient + (part < remainder)


def bounds(plan: Plan, buffer: Buffer, shape: Shape) -> list[tuple[int, int]]:
    """Return (offset, length) in elements of each block of `buffer`, by index in memory."""
    partition = plan.partition(buffer)
    if partition.blocks == 0:
        return []
    if partition.like is not None:
        return _copies(bounds(plan, partition.like, shape), partition)
    return [
        (offset + start, length)
        for offset, share in _shares(partition, buffer, shape)
        for start, length in (split(share, partition.parts, part) for part in range(partition.parts))
    ]


def _shares(partition: Partition, buffer: Buffer, shape: Shape) -> Iterable[tuple[int, int]]:
    if partition.counts is Counts.OWN:
        shares = partition.blocks // partition.parts
        return (split(shape.elements[buffer], shares, share) for share in range(shares))
    lengths = shape.counts[partition.counts]
    return zip(accumulate(lengths, initial=0), lengths, strict=False)


def _copies(original: list[tuple[int, int]], partition: Partition) -> list[tuple[int, int]]:
    if partition.block is not None:
        original = [(0, original[partition.block][1])]
    total = sum(length for _, length in original)
    return [(copy * total + offset, length) for copy in range(partition.copies) for offset, length in original]


def pieces(
    plan: Plan, span: Span, block_bounds: Sequence[tuple[int, int]], segment: int, segments: int
) -> list[tuple[int, int]]:
    """Return (offset, length) in elements of the blocks of `span` in one segment, in order, without empty pieces."""
    nonempty = []
    for block in plan.physical_blocks(span):
        offset, length = block_bounds[block]
        start, part = split(length, segments, segment)
        if part:
            nonempty.append((offset + start, part))
    return nonempty
