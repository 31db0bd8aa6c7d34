"""How a call on arrays of a device is cut into segments that go through the host: pure arithmetic, alike on all ranks.

Each share is cut into as many parts as any other, so that the parts of all ranks with one number make a call of their
own, whose results are that part of the results.

>>> from unisono.collectives.calls.shapes import layout_of
>>> [(part.reads, part.writes) for part in segments_of("allgather", layout_of("allgather", (4,), size=2, rank=1), 2, 4)]
[(((0, 2),), ((0, 2), (4, 2))), (((2, 2),), ((2, 2), (6, 2)))]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from unisono.algorithms.ir.contracts import CONTRACTS, Cut
from unisono.collectives.calls.shapes import Extents, Layout

# Elements that lie one after the other: the first, and how many.
Run: TypeAlias = tuple[int, int]


class Segment(NamedTuple):
    """A part of a call.

    Attributes:
        reads, writes: the elements of INPUT and of OUTPUT, in the order in which they lie in the call of this part.
        counts: its counts, in elements, for those of INPUT and OUTPUT that have some; None for equal shares.
    """

    reads: tuple[Run, ...]
    writes: tuple[Run, ...]
    counts: tuple[Extents, ...] | None


def segments_of(collective: str, layout: Layout, size: int, most: int) -> list[Segment]:
    """Return the parts of a call on `size` ranks, of about `most` elements of the whole vector each.

    Where no rank knows the whole vector, there is one part.
    """
    contract = CONTRACTS[collective]
    parts = max(1, -(-layout.whole // most))
    both = [
        _shares(cut, elements, layout, side, size)
        for side, (cut, elements) in enumerate(zip((contract.input, contract.output), layout.elements, strict=True))
    ]
    rows = None if layout.rows is None else [[count * layout.row for count in counts] for counts in layout.rows]
    return [
        Segment(
            _runs(both[0], part, parts),
            _runs(both[1], part, parts),
            None if rows is None else tuple(tuple(_cut(each, part, parts)[1] for each in counts) for counts in rows),
        )
        for part in range(parts)
    ]


def _shares(cut: Cut | None, elements: int, layout: Layout, side: int, size: int) -> Sequence[int]:
    """Return the elements of each share that a buffer has."""
    if cut is not Cut.SHARES:
        return [elements]
    if layout.rows is None:
        return [elements // size] * size
    return [count * layout.row for count in layout.rows[side if len(layout.rows) > 1 else 0]]


def _runs(shares: Sequence[int], part: int, parts: int) -> tuple[Run, ...]:
    offset, runs = 0, []
    for share in shares:
        first, count = _cut(share, part, parts)
        runs.append((offset + first, count))
        offset += share
    return tuple(runs)


def _cut(count: int, part: int, parts: int) -> Run:
    first = count * part // parts
    return first, count * (part + 1) // parts - first
