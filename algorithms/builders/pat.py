"""Parallel aggregated trees (PAT): Bruck's algorithm with the far distances first, in messages of bounded size.

In an allgather, the block of each rank travels down a binomial tree over the ranks after it. The trees of all ranks run
at the same time, and one message carries blocks of many trees. Bruck's algorithm begins with the nearest rank, so its
last and longest messages go farthest. Here the farthest rank comes first, while there is one block to send, and the
longest messages go to neighbours. In the reduce-scatter, partial results flow up the same trees, nearest rank first.

`aggregate` bounds the blocks in one message, unless it is None. Let T be the least power of two for which
⌈size / T⌉ ≤ aggregate. The distances that are multiples of T take ⌈log2 ⌈size / T⌉⌉ rounds. Then each of the T - 1
links inside a subtree of T ranks takes a round of its own, in depth-first order, for the subtrees of all blocks at
once.
Without a bound, T is 1 and there are ⌈log2 size⌉ rounds. With aggregate = 1, there are size - 1, as many as around a
ring. Because of the depth-first order, a rank of a reduce-scatter holds at most ⌈size / T⌉·log2 T partial results at a
time, or ⌈size / 2⌉ if T is 1.

The rank at *place* d of the tree of a block is the d-th rank after the block's own rank, modulo the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from unisono.algorithms.builders.arguments import check_at_least, check_ranks
from unisono.algorithms.builders.lane_pieces import single_rank_lane, with_own_block
from unisono.algorithms.ir.plan import (
    Buffer,
    Copy,
    Group,
    Lane,
    Partition,
    Plan,
    Recv,
    RecvReduce,
    Send,
    Span,
    Step,
    even,
    input_block,
    output_block,
    scratch_block,
    scratch_like,
    shares,
)


def allgather_pat(size: int, rank: int, root: int = 0, varying: bool = False, aggregate: int | None = None) -> Plan:
    """Return the plan of an allgather down aggregated trees, for any number of ranks.

    INPUT is one block, and may be the memory of block `rank` of OUTPUT. OUTPUT is `size` blocks: equal ones or, if
    `varying`, by the counts of the ranks. A message has at most `aggregate` blocks, if
    that is not None.
    """
    check_ranks(size, rank, root)
    check_at_least("aggregate", size if aggregate is None else aggregate, 1)
    lane = tuple(
        Group(
            (
                Send((rank + link.distance) % size, _blocks(Buffer.OUTPUT, rank - link.place, link)),
                Recv((rank - link.distance) % size, _blocks(Buffer.OUTPUT, rank - link.place - link.distance, link)),
            )
        )
        for link in _links(size, aggregate)
    )
    return Plan(
        "allgather", "pat", size, rank, root, even(1), shares(size, varying), lanes=(with_own_block(rank, lane),)
    )


def reduce_scatter_pat(
    size: int, rank: int, root: int = 0, varying: bool = False, aggregate: int | None = None
) -> Plan:
    """Return the plan of a reduce-scatter up aggregated trees, for any number of ranks.

    INPUT is `size` blocks: equal ones or, if `varying`, by the counts of the ranks. OUTPUT is one block, and may be the
    memory of block `rank` of INPUT. SCRATCH is like INPUT. A message has at most `aggregate` blocks, if
    that is not None.
    """
    check_ranks(size, rank, root)
    check_at_least("aggregate", size if aggregate is None else aggregate, 1)
    vector = shares(size, varying)
    return Plan(
        collective="reduce_scatter",
        algorithm="pat",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=even(1),
        scratch=scratch_like(Buffer.INPUT, vector) if size > 2 else Partition(0),
        lanes=(_reduce_scatter(size, rank, aggregate) if size > 1 else single_rank_lane(),),
    )


class _PatLink(NamedTuple):
    """One link of all trees at once, for an allgather: from the ranks at some places to those `distance` further.

    The places of the senders are place + i·period for i = 0 … number - 1.
    """

    place: int
    distance: int
    period: int
    number: int


def _links(size: int, aggregate: int | None) -> Iterator[_PatLink]:
    """Yield the links of the trees in the order of an allgather, each with the places that the trees have."""
    inner = 1 << (-(-size // (aggregate or size)) - 1).bit_length()
    distance = inner
    while 2 * distance < size:
        distance *= 2
    while inner <= distance < size:
        yield _PatLink(0, distance, 2 * distance, _count(size, distance, 2 * distance))
        distance //= 2
    for place, step in _depth_first(0, inner):
        if place + step < size:
            yield _PatLink(place, step, inner, _count(size, place + step, inner))


def _depth_first(place: int, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield the links of a subtree of `ranks` ranks, as (place of the sender, distance), upper ones first."""
    if ranks > 1:
        half = ranks // 2
        yield place, half
        yield from _depth_first(place + half, half)
        yield from _depth_first(place, half)


def _count(size: int, place: int, period: int) -> int:
    """Return how many of place, place + period, … are below `size`."""
    return -(-(size - place) // period)


def _blocks(buffer: Buffer, first: int, link: _PatLink) -> Span:
    """Return the blocks of a message over a link, from block `first` on."""
    return Span(buffer, first, link.number, -link.period)


def _reduce_scatter(size: int, rank: int, aggregate: int | None) -> Lane:
    """Return the rounds of a reduce-scatter: the links of the allgather backwards, against their direction.

    `stored` are the places for whose blocks this rank has a partial result in SCRATCH; for others it has its INPUT.
    """
    links = list(reversed(list(_links(size, aggregate))))
    stored: set[int] = set()
    lane: Lane = ()
    for link in links:
        deep = link.place + link.distance
        source = Buffer.SCRATCH if deep in stored else Buffer.INPUT
        own = Buffer.SCRATCH if link.place in stored else Buffer.INPUT
        into = output_block() if link is links[-1] else _blocks(Buffer.SCRATCH, rank - link.place, link)
        steps: list[Step] = [
            Send((rank - link.distance) % size, _blocks(source, rank - deep, link)),
            RecvReduce(
                (rank + link.distance) % size, into, _blocks(own, rank - link.place, link), lower=link is links[-1]
            ),
        ]
        last = link.place + link.number * link.period
        if own is Buffer.INPUT and last < size:
            # Nothing arrives for this block. Copy it to the others, so that one span names them all.
            steps.append(Copy(scratch_block(rank - last), input_block(rank - last)))
        if own is Buffer.INPUT:
            stored |= set(range(link.place, size, link.period))
        lane = (*lane, Group(tuple(steps)))
    return lane
