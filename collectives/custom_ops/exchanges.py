"""Chooses the exchanges of a reduction by a Python function: which arrays travel to which rank, by which collectives.

Used by: `reducer.py`. This file only computes shapes, and returns the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unisono.collectives.calls.planning import CallSpec, as_request
from unisono.collectives.calls.shapes import Extents, layout_of
from unisono.errors import NoAlgorithmError, UsageError
from unisono.foundation.records import record
from unisono.operations import Op

# The reductions that may gather all contributions on every rank, or on the root.
WHOLE = frozenset({"allreduce", "reduce", "scan", "exscan"})
# The reductions with a different result on each rank, made of the contributions of the ranks up to it.
PREFIXES = frozenset({"scan", "exscan"})


@record
class Draft:
    """This rank's part in a reduction by a Python function.

    Attributes:
        exchanges: the call spec of the exchange that gathers contributions here, and then, if the results must travel
            on, that of a second exchange.
        staged: the rows and the elements per row of the memory for contributions; a row for each rank, or none.
        rows: the number of rows that this rank combines, from rank 0 on.
        sent: the number of rows of results that the second exchange sends.
        is_whole: whether a rank that combines has all elements, and not only its share.
    """

    exchanges: Sequence[CallSpec]
    staged: tuple[int, int]
    rows: int
    sent: int = 0
    is_whole: bool = False


def draft_whole(spec: CallSpec, size: int, rank: int) -> Draft:
    """Return the draft of a reduction in which each rank with a result gathers all contributions and combines them."""
    count = count_of(spec)
    to_root = spec.collective == "reduce"
    exchange = _exchange(spec, "gather" if to_root else "allgather", count, size, rank)
    rows = {"scan": rank + 1, "exscan": rank, "reduce": size if rank == spec.root else 0}.get(spec.collective, size)
    return Draft([exchange], (0 if to_root and not rows else size, count), rows, is_whole=True)


def draft_shared(spec: CallSpec, size: int, rank: int) -> Draft:
    """Return the draft of a reduction in which each rank combines only its share of the elements."""
    count = count_of(spec)
    shares = tuple(count // size + (each < count % size) for each in range(size))
    if spec.layout is not None and spec.layout.rows is not None:
        shares = tuple(each * spec.layout.row for each in spec.layout.rows[0])
    mine = shares[rank]
    recv_counts = (mine,) * size
    first = _exchange(spec, "alltoall", count, size, rank, (shares, recv_counts))
    # An exscan sends nothing to rank 0.
    prefix_counts = (0, *recv_counts[1:]), shares if rank else (0,) * size
    # For each collective: rows to combine, rows of results to send, the second exchange, and its counts.
    rows, sent, name, counts = {
        "allreduce": (size, 1, "allgather", (shares,)),
        "reduce": (size, 1, "gather", (shares,)),
        "reduce_scatter": (size, 0, None, ()),
        "scan": (size, size, "alltoall", (recv_counts, shares)),
        "exscan": (size - 1, size - 1, "alltoall", prefix_counts),
    }[spec.collective]
    second = [] if name is None else [_exchange(spec, name, sent * mine, size, rank, counts)]
    return Draft([first, *second], (size, mine), rows, sent)


def count_of(spec: CallSpec) -> int:
    """Return how many elements each rank contributes."""
    assert spec.layout is not None, "a reduction has an array"
    return spec.layout.elements[0]


def _exchange(
    spec: CallSpec, collective: str, count: int, size: int, rank: int, rows: tuple[Extents, ...] | None = None
) -> CallSpec:
    """Return the spec of an exchange in which this rank has `count` elements, in equal shares or with these counts."""
    layout = layout_of(collective, (count,), size=size, rank=rank, rows=rows)
    if collective == "alltoall":
        # A rank does not know the counts of other ranks in an alltoallv, but here they follow from `spec`.
        layout = replace(layout, whole=count_of(spec))
    root = spec.root if collective == "gather" else None
    # An algorithm that the options force is for calls of the user only.
    return CallSpec(collective, layout, spec.dtype, root=root, algorithm="auto")


def check(spec: CallSpec) -> None:
    """Check that a reduction by a Python function takes the dtype, and can fulfil the request for an algorithm.

    Raises:
        UsageError: the elements are only moved, or the request has an `accumulate`.
        NoAlgorithmError: the request names an algorithm.
    """
    assert isinstance(spec.op, Op), "a custom op is an Op, not a name"
    assert spec.dtype is not None, "a reduction has an array"
    spec.op.check(spec.dtype)
    request, name = as_request(spec.algorithm), spec.op.name
    if request.accumulate is not None:
        raise UsageError(
            f"accumulate is not for op {name}, whose function gets x in its own dtype: cast x before the call"
        )
    if request.algorithm is not None:
        raise NoAlgorithmError(
            f"{spec.collective} by {request.algorithm!r} combines partial results on the way, but {name} is a Python "
            "function, which combines all contributions on one rank, in the order of ranks: leave algorithm out"
        )
