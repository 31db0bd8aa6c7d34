"""Cuts a call on GPU arrays into smaller calls that are staged through the host. Pure arithmetic, equal on all ranks.

Every share is cut into the same number of parts. So the k-th parts of all ranks form a call of their own, and its
results are the k-th parts of the results.

>>> from unisono.collectives.calls.shapes import layout_of
>>> layout = layout_of("allgather", (4,), size=2, rank=1)
>>> [(part.reads, part.writes) for part in partial_calls("allgather", layout, 2, 4)]
[(((0, 2),), ((0, 2), (4, 2))), (((2, 2),), ((2, 2), (6, 2)))]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from unisono.algorithms.ir.contracts import CONTRACTS, Cut
from unisono.collectives.calls.shapes import Extents, Layout

# Consecutive elements: the index of the first, and their number.
Run: TypeAlias = tuple[int, int]


class PartialCall(NamedTuple):
    """One of the smaller calls that a call is cut into.

    Attributes:
        reads, writes: the elements of INPUT and of OUTPUT, in the order in which the smaller call has them.
        counts: the counts of the smaller call, in elements; None for equal shares.
    """

    reads: tuple[Run, ...]
    writes: tuple[Run, ...]
    counts: tuple[Extents, ...] | None


def partial_calls(collective: str, layout: Layout, size: int, most: int) -> list[PartialCall]:
    """Return the smaller calls of a call on `size` ranks, each on about `most` elements of the whole vector.

    There is one if no rank knows the length of the whole vector.
    """
    contract = CONTRACTS[collective]
    parts = max(1, -(-layout.whole // most))
    shares = [
        _shares(cut, elements, layout, side, size)
        for side, (cut, elements) in enumerate(zip((contract.input, contract.output), layout.elements, strict=True))
    ]
    rows = None if layout.rows is None else [[count * layout.row for count in counts] for counts in layout.rows]
    return [
        PartialCall(
            _runs(shares[0], part, parts),
            _runs(shares[1], part, parts),
            None if rows is None else tuple(tuple(_cut(count, part, parts)[1] for count in counts) for counts in rows),
        )
        for part in range(parts)
    ]


def _shares(cut: Cut | None, elements: int, layout: Layout, side: int, size: int) -> Sequence[int]:
    """Return the number of elements of each share in a buffer."""
    if cut is not Cut.SHARES:
        return [elements]
    if layout.rows is None:
        return [elements // size] * size
    return [count * layout.row for count in layout.rows[side if len(layout.rows) > 1 else 0]]


def _runs(shares: Sequence[int], part: int, parts: int) -> tuple[Run, ...]:
    """Return where one part of each share lies in the buffer."""
    offset, runs = 0, []
    for share in shares:
        first, count = _cut(share, part, parts)
        runs.append((offset + first, count))
        offset += share
    return tuple(runs)


def _cut(count: int, part: int, parts: int) -> Run:
    """Return where one of `parts` nearly equal parts lies in a share of `count` elements."""
    first = count * part // parts
    return first, count * (part + 1) // parts - first
