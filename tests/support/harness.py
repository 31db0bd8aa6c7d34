"""Calls for executors in tests; `support.ranks` starts the ranks that make them."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.algorithms.catalogue.registry import ALGORITHMS, find
from unisono.algorithms.ir.binding import Shape
from unisono.algorithms.ir.plan import Counts, Plan
from unisono.dtypes import DTYPES
from unisono.operations import operation
from unisono.transports.contracts.call import Call, Extent, Signature


def message_algorithms(collective: str) -> list[str]:
    """Return the names of the algorithms of a collective that need no mapped memory."""
    return [name for name, algorithm in ALGORITHMS[collective].items() if not algorithm.mapped]


def make_call(
    collective: str,
    algorithm: str,
    size: int,
    rank: int,
    *,
    dtype: str | None,
    count: int,
    op: str | None = None,
    root: int | None = None,
    segments: int = 1,
) -> Call:
    """Return the call of a registered algorithm. `dtype` is None for a barrier, and `root` if there is none."""
    plan = find(collective, algorithm).build(size, rank, root or 0)
    return call_of(plan, dtype, (count, count), op=op, root=root, segments=segments)


def call_of(
    plan: Plan,
    dtype: str | None,
    elements: tuple[int, int],
    *,
    op: str | None = None,
    root: int | None = None,
    segments: int = 1,
    counts: dict[Counts, Sequence[int]] | None = None,
) -> Call:
    """Return the call of `plan`. `elements` are the lengths of INPUT and OUTPUT, and `counts` as in `Shape`."""
    shape = None if dtype is None or counts else (elements[0],)
    extent = None if dtype is None else Extent(elements, DTYPES[dtype], None if op is None else operation(op))
    return Call(
        signature=Signature(plan.collective, dtype, shape, "C", op, root, plan.algorithm, segments),
        plan=plan,
        shape=Shape(elements, counts or {}),
        extents=() if extent is None else (extent,),
        segments=segments,
    )
