"""How the arrays of a collective relate: from the shape of one of them to those of the others, by what is cut how.

The contracts of the algorithms say which vector lies in INPUT and OUTPUT: the whole one, the share of a rank, or the
shares of all ranks, one after the other along the first axis. Shares are equal, or have counts of rows of their own.
Everything here is pure arithmetic of integers.

>>> layout_of("allgather", (2, 3), size=4, rank=1).results
((8, 3), (4, 2, 3))
>>> layout_of("reduce_scatter", (8, 3), size=4, rank=1).elements
(24, 6)
>>> layout_of("allgather", (2, 3), size=2, rank=1, rows=((0, 2),)).results
((2, 3),)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import TypeAlias

from unisono.algorithms.ir.contracts import CONTRACTS, Cut
from unisono.algorithms.ir.plan import Counts
from unisono.errors import UsageError
from unisono.records import record

Extents: TypeAlias = tuple[int, ...]
# No array is larger; counts that say so are none.
_MOST_ELEMENTS = (1 << 63) // 16


@record
class Layout:
    """The shapes of one call on one rank. Calls with equal layouts are alike, but for dtype, order, operation and root.

    Attributes:
        agreed: what all ranks must agree on: the shape of `x`; of a row where there are counts; the elements of a share
            where only the root has an `x`.
        elements: of INPUT and OUTPUT.
        whole: elements of the vector that the collective is about, as all ranks know it; 0 where they do not.
        results: the shapes that the result may have, first the one that it has by default.
        offset: elements from the beginning of INPUT to that of OUTPUT where both are in the same memory.
        rows: the counts, in rows, of those that there are of INPUT and OUTPUT; None for equal shares.
        row: elements of a row, where there are counts.
    """

    agreed: Extents
    elements: tuple[int, int]
    whole: int
    results: tuple[Extents, ...]
    offset: int = 0
    rows: tuple[Extents, ...] | None = None
    row: int = 1


def layout_of(
    collective: str, shape: Extents, *, size: int, rank: int, rows: tuple[Extents, ...] | None = None
) -> Layout:
    """Return the layout of a call whose `x` has this shape.

    Raises:
        UsageError: the shape cannot be cut like that, or is not what the counts say.
    """
    contract = CONTRACTS[collective]
    if contract.input is Cut.VECTOR:
        return Layout(shape, (prod(shape), prod(shape)), prod(shape), (shape,))
    if rows is not None:
        return _COUNTED[contract.input, contract.output](shape, size, rank, rows)
    layout = _EQUAL[contract.input, contract.output](shape, size, rank, ())
    return replace(layout, agreed=(layout.elements[1],)) if contract.input_at_root else layout


def layout_of_share(shape: Extents, *, size: int, rank: int, rows: tuple[Extents, ...] | None = None) -> Layout:
    """Return the layout of a scatter on a rank that is not the root, whose `out` has this shape.

    Raises:
        UsageError: the shape is not what the counts say.
    """
    elements = prod(shape)
    if rows is None:
        return Layout((elements,), (elements * size, elements), elements * size, (shape,))
    _check_rows("out", shape, rows[0][rank], f"counts[{rank}]")
    row = prod(shape[1:])
    return Layout(shape[1:], (row * sum(rows[0]), elements), row * sum(rows[0]), (shape,), rows=rows, row=row)


def checked_rows(name: str, counts: Sequence[int], size: int) -> Extents:
    """Return the counts, one for each rank, as they were given under `name`.

    Raises:
        UsageError: they are not `size` integers that are at least 0, or too large to be true.
    """
    try:
        found = tuple(operator.index(count) for count in counts)
    except TypeError:
        raise UsageError(f"{name} must be a sequence of integers, not {counts!r}") from None
    if len(found) != size:
        raise UsageError(f"{name} must be {size} integers, one for each rank; got {len(found)}")
    if any(isinstance(count, bool) for count in counts) or min(found) < 0 or sum(found) > _MOST_ELEMENTS:
        raise UsageError(f"{name} must be numbers of rows, at least 0; got {list(found)}")
    return found


def counts_of(kinds: tuple[Counts, Counts] | None, layout: Layout) -> dict[Counts, Sequence[int]]:
    """Return the elements of each block, by kind, for plans whose shares are not equal."""
    if layout.rows is None or kinds is None:
        return {}
    both = (layout.rows[0], layout.rows[-1])
    return {kind: [count * layout.row for count in counts] for kind, counts in zip(kinds, both, strict=True)}


# --- equal shares --------------------------------------------------------------------------------------------------


def _gathered(shape: Extents, size: int, rank: int, _: tuple[Extents, ...]) -> Layout:
    elements = prod(shape)
    rows = (size * shape[0], *shape[1:]) if shape else (size,)
    whole = size * elements
    return Layout(shape, (elements, whole), whole, (rows, (size, *shape)), offset=-rank * elements)


def _scattered(shape: Extents, size: int, rank: int, _: tuple[Extents, ...]) -> Layout:
    share = (_divided(shape, size), *shape[1:])
    elements = prod(share)
    results = (share, shape[1:]) if share[0] == 1 else (share,)
    return Layout(shape, (size * elements, elements), size * elements, results, offset=rank * elements)


def _exchanged(shape: Extents, size: int, rank: int, _: tuple[Extents, ...]) -> Layout:
    _divided(shape, size)
    return Layout(shape, (prod(shape), prod(shape)), prod(shape), (shape,))


def _divided(shape: Extents, size: int) -> int:
    """Return how many rows each rank has of an array of this shape."""
    if not shape or shape[0] % size:
        what = f"has {shape[0]} rows" if shape else "is 0-dimensional"
        raise UsageError(
            f"x {what}, which {size} ranks cannot share equally: its first axis must be divisible by {size}"
        )
    return shape[0] // size


# --- counts of rows ------------------------------------------------------------------------------------------------


def _gathered_rows(shape: Extents, size: int, rank: int, rows: tuple[Extents, ...]) -> Layout:
    counts = rows[0]
    _check_rows("x", shape, counts[rank], f"counts[{rank}]")
    row, total = prod(shape[1:]), sum(counts)
    result = (total, *shape[1:])
    elements = (prod(shape), total * row)
    return Layout(shape[1:], elements, elements[1], (result,), -sum(counts[:rank]) * row, rows, row)


def _scattered_rows(shape: Extents, size: int, rank: int, rows: tuple[Extents, ...]) -> Layout:
    counts = rows[0]
    _check_rows("x", shape, sum(counts), "the sum of counts")
    row = prod(shape[1:])
    share = (counts[rank], *shape[1:])
    return Layout(shape[1:], (prod(shape), prod(share)), prod(shape), (share,), sum(counts[:rank]) * row, rows, row)


def _exchanged_rows(shape: Extents, size: int, rank: int, rows: tuple[Extents, ...]) -> Layout:
    sent, received = rows
    _check_rows("x", shape, sum(sent), "the sum of send_counts")
    if sent[rank] != received[rank]:
        what = f"send_counts[{rank}] is {sent[rank]} and recv_counts[{rank}] is {received[rank]}"
        raise UsageError(f"{what}, which are the same rows: those that this rank keeps")
    result = (sum(received), *shape[1:])
    return Layout(shape[1:], (prod(shape), prod(result)), 0, (result,), 0, rows, prod(shape[1:]))


def _check_rows(name: str, shape: Extents, rows: int, what: str) -> None:
    if not shape or shape[0] != rows:
        found = f"has {shape[0]} rows" if shape else "is 0-dimensional"
        raise UsageError(f"{name} {found}, and {what} is {rows}")


_Rule: TypeAlias = Callable[[Extents, int, int, tuple[Extents, ...]], Layout]

_EQUAL: dict[tuple[Cut, Cut | None], _Rule] = {
    (Cut.SHARE, Cut.SHARES): _gathered,
    (Cut.SHARES, Cut.SHARE): _scattered,
    (Cut.SHARES, Cut.SHARES): _exchanged,
}
_COUNTED: dict[tuple[Cut, Cut | None], _Rule] = {
    (Cut.SHARE, Cut.SHARES): _gathered_rows,
    (Cut.SHARES, Cut.SHARE): _scattered_rows,
    (Cut.SHARES, Cut.SHARES): _exchanged_rows,
}
