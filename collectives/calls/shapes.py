"""Derives the shapes of all arrays of a collective from the shape of one.

The contracts of the collectives (`algorithms/ir/contracts.py`) say which vector is in INPUT and in OUTPUT: the whole
vector, the share of one rank, or the shares of all ranks, concatenated along the first axis. Shares are equal, or have
counts of rows. This file only computes with integers.

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
from functools import lru_cache
from math import prod
from typing import TypeAlias

from unisono.algorithms.ir.contracts import CONTRACTS, Cut
from unisono.algorithms.ir.plan import Counts
from unisono.errors import UsageError
from unisono.foundation.records import record

Extents: TypeAlias = tuple[int, ...]
# No array has more elements, so larger counts are an error.
_MOST_ELEMENTS = (1 << 63) // 16
# The number of layouts of whole vectors that are kept for repeated calls.
_MOST_WHOLE = 256


@record
class Layout:
    """The shapes of one call on one rank. Calls with equal layouts differ at most in dtype, order, op and root.

    Attributes:
        agreed: the shape on which all ranks must agree. It is the shape of `x`. With counts it is the shape of a row.
            If only the root has an `x`, it is the number of elements of a share.
        elements: the numbers of elements of INPUT and OUTPUT.
        whole: the number of elements of the whole vector, as all ranks know it; 0 if they do not.
        results: the shapes that the result may have; the first one is the default.
        offset: elements from the start of INPUT to the start of OUTPUT if the call runs in place.
        rows: the counts of rows, of INPUT and OUTPUT or of the one that has counts; None for equal shares.
        row: the number of elements of a row, if there are counts.
        counts_at_root: whether only the root knows all counts. Other ranks have 0 as the counts of all ranks but their
            own.
    """

    agreed: Extents
    elements: tuple[int, int]
    whole: int
    results: tuple[Extents, ...]
    offset: int = 0
    rows: tuple[Extents, ...] | None = None
    row: int = 1
    counts_at_root: bool = False


def layout_of(
    collective: str, shape: Extents, *, size: int, rank: int, rows: tuple[Extents, ...] | None = None
) -> Layout:
    """Return the layout of a call whose `x` has this shape.

    Raises:
        UsageError: the rows cannot be divided equally, or do not match the counts.
    """
    contract = CONTRACTS[collective]
    if contract.input is Cut.VECTOR:
        return _whole(shape)
    if rows is not None:
        return _COUNTED[contract.input, contract.output](shape, size, rank, rows)
    layout = _EQUAL[contract.input, contract.output](shape, size, rank, ())
    return replace(layout, agreed=(layout.elements[1],)) if contract.input_at_root else layout


@lru_cache(_MOST_WHOLE)
def _whole(shape: Extents) -> Layout:
    """Return the layout in which INPUT and OUTPUT are the whole vector."""
    elements = prod(shape)
    return Layout(shape, (elements, elements), elements, (shape,))


def layout_of_share(shape: Extents, *, size: int, rank: int, rows: tuple[Extents, ...] | None = None) -> Layout:
    """Return the layout of a scatter on a rank other than the root, from the shape of its `out`.

    Raises:
        UsageError: the rows do not match the counts.
    """
    elements = prod(shape)
    if rows is None:
        return Layout((elements,), (elements * size, elements), elements * size, (shape,))
    _check_rows("out", shape, rows[0][rank], f"counts[{rank}]")
    row = prod(shape[1:])
    return Layout(shape[1:], (row * sum(rows[0]), elements), row * sum(rows[0]), (shape,), rows=rows, row=row)


class RootCounts(tuple[int, ...]):
    """The counts of a call of which only the root knows those of all ranks. It is empty on other ranks."""

    __slots__ = ()


def own_count(collective: str, shape: Extents, size: int, rank: int) -> tuple[Extents, ...]:
    """Return counts with that of this rank alone, whose share has this shape; the others are 0.

    Raises:
        UsageError: the share has no rows.
    """
    if not shape:
        raise UsageError(f"the share of this rank in {collective} is 0-dimensional: pass an array of rows")
    return (tuple(shape[0] if each == rank else 0 for each in range(size)),)


def checked_rows(name: str, counts: Sequence[int], size: int, each: str = "rank") -> Extents:
    """Return the counts, one for each of `size` ranks, as a tuple of integers.

    Raises:
        UsageError: `counts` are not `size` integers from 0 on, or their sum is larger than any array. The text calls
            them `name`, and says that there is one for each `each`.
    """
    try:
        rows = tuple(operator.index(count) for count in counts)
    except TypeError:
        raise UsageError(f"{name} must be a sequence of integers, not {counts!r}") from None
    if len(rows) != size:
        raise UsageError(f"{name} must be {size} integers, one for each {each}; got {len(rows)}")
    if any(isinstance(count, bool) for count in counts) or min(rows, default=0) < 0 or sum(rows) > _MOST_ELEMENTS:
        raise UsageError(f"{name} must be numbers of rows, at least 0; got {list(rows)}")
    return rows


def counts_of(names: tuple[Counts, Counts] | None, layout: Layout, units: int = 1) -> dict[Counts, Sequence[int]]:
    """Return the elements of each block for a plan with unequal shares; empty for equal shares.

    Args:
        names: the names of the counts in the plan, of INPUT and OUTPUT.
        layout: the layout of the call.
        units: the number of elements of the plan in an element of the array (`DType.units`).
    """
    if layout.rows is None or names is None:
        return {}
    both = (layout.rows[0], layout.rows[-1])
    return {name: [count * layout.row * units for count in counts] for name, counts in zip(names, both, strict=True)}


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
    """Return the number of rows of each rank's equal share; raise `UsageError` if the rows cannot be divided."""
    if not shape or shape[0] % size:
        rows = f"has {shape[0]} rows" if shape else "is 0-dimensional"
        raise UsageError(
            f"x {rows}, which {size} ranks cannot share equally: its first axis must be divisible by {size}"
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
        raise UsageError(
            f"send_counts[{rank}] is {sent[rank]} and recv_counts[{rank}] is {received[rank]}, but both count the rows "
            "that this rank keeps: pass the same number"
        )
    result = (sum(received), *shape[1:])
    return Layout(shape[1:], (prod(shape), prod(result)), 0, (result,), 0, rows, prod(shape[1:]))


def _check_rows(array: str, shape: Extents, rows: int, counts: str) -> None:
    """Raise `UsageError` unless an array has `rows` rows. `array` and `counts` name both in the message."""
    if not shape or shape[0] != rows:
        actual = f"has {shape[0]} rows" if shape else "is 0-dimensional"
        raise UsageError(f"{array} {actual}, and {counts} is {rows}: they must be equal")


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
