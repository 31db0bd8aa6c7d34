"""By which exchanges reductions by functions are carried out: pure arithmetic of shapes, alike on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unisono.collectives.calls.planning import CallSpec, as_request
from unisono.collectives.calls.shapes import Extents, layout_of
from unisono.errors import NoAlgorithmError, UsageError
from unisono.operations import Op
from unisono.records import record

# What may be done by bringing everything to everybody, or to the root; and those that have a result for each rank.
WHOLE = frozenset({"allreduce", "reduce", "scan", "exscan"})
PREFIXES = frozenset({"scan", "exscan"})


@record
class Draft:
    """How a rank takes its part in a reduction by a function.

    Attributes:
        exchanges: the kinds of one exchange that brings contributions here, and of one that takes results on, if need
            be.
        staged: rows and elements of each, of what comes here: a row for each rank, or none.
        rows: how many of them matter, from rank 0 on.
        sent: how many rows of results the second exchange takes on.
        is_whole: whether those who combine have all elements, or a share of them.
    """

    exchanges: Sequence[CallSpec]
    staged: tuple[int, int]
    rows: int
    sent: int = 0
    is_whole: bool = False


def draft_whole(kind: CallSpec, size: int, rank: int) -> Draft:
    """Return the way by which the contributions are brought to whoever has a result, which each of them combines."""
    count = count_of(kind)
    to_root = kind.collective == "reduce"
    exchange = _exchange(kind, "gather" if to_root else "allgather", count, size, rank)
    rows = {"scan": rank + 1, "exscan": rank, "reduce": size if rank == kind.root else 0}.get(kind.collective, size)
    return Draft([exchange], (0 if to_root and not rows else size, count), rows, is_whole=True)


def draft_shared(kind: CallSpec, size: int, rank: int) -> Draft:
    """Return the way by which each rank combines a share of the elements."""
    count = count_of(kind)
    shares = tuple(count // size + (each < count % size) for each in range(size))
    if kind.layout is not None and kind.layout.rows is not None:
        shares = tuple(each * kind.layout.row for each in kind.layout.rows[0])
    mine = shares[rank]
    to_me = (mine,) * size
    first = _exchange(kind, "alltoall", count, size, rank, (shares, to_me))
    # Rows that are combined, rows of results that go on, by which exchange, and what is sent and received there.
    before = (0, *to_me[1:]), shares if rank else (0,) * size
    rows, sent, name, counts = {
        "allreduce": (size, 1, "allgather", (shares,)),
        "reduce": (size, 1, "gather", (shares,)),
        "reduce_scatter": (size, 0, None, ()),
        "scan": (size, size, "alltoall", (to_me, shares)),
        "exscan": (size - 1, size - 1, "alltoall", before),
    }[kind.collective]
    second = [] if name is None else [_exchange(kind, name, sent * mine, size, rank, counts)]
    return Draft([first, *second], (size, mine), rows, sent)


def count_of(kind: CallSpec) -> int:
    """Return how many elements each rank contributes."""
    assert kind.layout is not None, "a reduction has an array"
    return kind.layout.elements[0]


def _exchange(
    kind: CallSpec, collective: str, count: int, size: int, rank: int, rows: tuple[Extents, ...] | None = None
) -> CallSpec:
    """Return an exchange of flat arrays of which this rank has `count` elements, in equal shares or by these `rows`."""
    layout = layout_of(collective, (count,), size=size, rank=rank, rows=rows)
    if collective == "alltoall":
        # Of such counts no rank knows those of the others, but of these it does.
        layout = replace(layout, whole=count_of(kind))
    root = kind.root if collective == "gather" else None
    # The algorithm that the options name is for calls of the user.
    return CallSpec(collective, layout, kind.dtype, root=root, algorithm="auto")


def check(kind: CallSpec) -> None:
    """Check that an operation by a function can do what is wanted of a call.

    Raises:
        UsageError: it is to be accumulated in another dtype.
        NoAlgorithmError: an algorithm is named.
    """
    assert isinstance(kind.op, Op), "no function has a name"
    wanted, name = as_request(kind.algorithm), kind.op.name
    if wanted.accumulate is not None:
        raise UsageError(f"accumulate is not for op {name}, which is given x as it is: cast x before the call")
    if wanted.algorithm is not None:
        raise NoAlgorithmError(
            f"{kind.collective} by {wanted.algorithm!r} combines on the way; {name} is a function of Python, which is "
            "called where all contributions meet, in the order of ranks: leave algorithm out"
        )
