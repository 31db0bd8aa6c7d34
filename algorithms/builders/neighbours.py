"""Neighbourhood collectives by direct messages: each rank sends to its neighbours and receives from them, at once.

MPI-4.1, section 8.6, defines the collectives. Their plans depend on a `Neighbourhood`, which is not a function of the
number of ranks, so the tables of `catalogue` do not hold them: `verifier.neighbours` proves them for the neighbourhoods
of all ranks.

A rank sends the block of each edge even if it has no elements, so that a receiver that expects some detects the
difference at once.

Two ranks may have several edges. One message carries the blocks of at most two of them, because a message is one span,
and a span (start, stride) can name any two blocks, but not any three. Further blocks travel in later groups. In a grid,
two ranks have at most two edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest

from unisono.algorithms.builders.arguments import check_ranks
from unisono.algorithms.ir.neighbourhood import Neighbourhood
from unisono.algorithms.ir.plan import (
    Copy,
    Counts,
    Group,
    Partition,
    Plan,
    Recv,
    Send,
    Span,
    Step,
    even,
    input_block,
    output_block,
)

NAME = "direct"


def neighbor_alltoall_direct(size: int, rank: int, neighbourhood: Neighbourhood, varying: bool = False) -> Plan:
    """Return the plan in which block i of INPUT goes to destination i, and block i of OUTPUT comes from source i.

    Blocks are equal or, if `varying`, have the counts of this rank. Blocks to and from no rank are not touched. INPUT
    and OUTPUT must not be the same memory.
    """
    check_ranks(size, rank)
    sent, received = neighbourhood.sent(), neighbourhood.received()
    sends = _by_group(sent, rank, lambda peer, blocks: Send(peer, _span(input_block, blocks), even_if_empty=True))
    receives = _by_group(
        received, rank, lambda peer, blocks: Recv(peer, _span(output_block, blocks), even_if_empty=True)
    )
    own = [
        Copy(output_block(target), input_block(source))
        for source, target in zip(sent.get(rank, ()), received.get(rank, ()), strict=True)
    ]
    groups = zip_longest(sends, receives, [own], fillvalue=())
    return Plan(
        collective="neighbor_alltoall",
        algorithm=NAME,
        size=size,
        rank=rank,
        root=0,
        input=_shares(neighbourhood.destinations, Counts.SEND if varying else Counts.OWN),
        output=_shares(neighbourhood.sources, Counts.RECEIVE if varying else Counts.OWN),
        lanes=(tuple(Group((*first, *second, *third)) for first, second, third in groups),),
    )


def neighbor_allgather_direct(size: int, rank: int, neighbourhood: Neighbourhood, varying: bool = False) -> Plan:
    """Return the plan in which INPUT, one block, goes to each destination, and block i of OUTPUT comes from source i.

    Blocks of OUTPUT are equal or, if `varying`, have the counts of this rank; blocks from no rank are not touched. A
    rank sends one message to each other destination, also if it has several edges to it: the receiver copies the block.
    """
    check_ranks(size, rank)
    received = neighbourhood.received()
    others = {peer: blocks for peer, blocks in received.items() if peer != rank}
    exchange: list[Step] = [
        Send(peer, input_block(), even_if_empty=True) for peer in neighbourhood.sent() if peer != rank
    ]
    exchange += [Recv(peer, output_block(blocks[0]), even_if_empty=True) for peer, blocks in others.items()]
    exchange += [Copy(output_block(block), input_block()) for block in received.get(rank, ())]
    again = [Copy(output_block(block), output_block(blocks[0])) for blocks in others.values() for block in blocks[1:]]
    return Plan(
        collective="neighbor_allgather",
        algorithm=NAME,
        size=size,
        rank=rank,
        root=0,
        input=even(1),
        output=_shares(neighbourhood.sources, Counts.RECEIVE if varying else Counts.OWN),
        lanes=((Group(tuple(exchange)), *((Group(tuple(again)),) if again else ())),),
    )


def _shares(neighbours: Sequence[int | None], counts: Counts) -> Partition:
    return Partition(len(neighbours), counts) if neighbours else Partition(0)


def _by_group(
    blocks_of: Mapping[int, Sequence[int]], rank: int, step: Callable[[int, Sequence[int]], Step]
) -> Iterator[list[Step]]:
    """Yield the steps of each group: two blocks of each other rank in the first one, the next two in the next."""
    most = max((len(blocks) for peer, blocks in blocks_of.items() if peer != rank), default=0)
    for first in range(0, most, 2):
        yield [
            step(peer, blocks[first : first + 2])
            for peer, blocks in blocks_of.items()
            if peer != rank and len(blocks) > first
        ]


def _span(make: Callable[..., Span], blocks: Sequence[int]) -> Span:
    """Return the span of one or two blocks."""
    return make(blocks[0], len(blocks), blocks[-1] - blocks[0] or 1)
