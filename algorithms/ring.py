"""Ring algorithms: every rank talks to its two neighbours only, and every link carries the same load in every round.

The vector is cut into one block per rank. In the reduce-scatter, partial results travel once around the ring, each
rank adding its contribution as they pass; in the allgather, the results travel once more. Both phases move the least
possible volume at any number of ranks; the price is a latency per rank and phase.
"""

from __future__ import annotations

from unisono.algorithms.checks import check_ranks
from unisono.algorithms.lanes import place_own
from unisono.algorithms.plan import (
    Copy,
    Group,
    Lane,
    Plan,
    Recv,
    RecvReduce,
    Repeat,
    Send,
    Span,
    even,
    input_block,
    output_block,
    shares,
)


def allreduce_ring(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of an allreduce as ring reduce-scatter and ring allgather.

    INPUT and OUTPUT are cut into `size` blocks and may be the same memory; there is no SCRATCH. The contributions to
    block b are combined in the order b, b + 1, …, modulo `size`, once, so that all ranks get the same bits.
    """
    check_ranks(size, rank, root)
    alone: Lane = (Group((Copy(output_block(), input_block(), lower=True),)),)
    return Plan(
        collective="allreduce",
        algorithm="ring",
        size=size,
        rank=rank,
        root=root,
        input=even(size),
        output=even(size),
        lanes=(_reduce_scatter(size, rank) + allgather_lane(size, rank, rank + 1) if size > 1 else alone,),
    )


def allgather_ring(size: int, rank: int, root: int = 0, varying: bool = False) -> Plan:
    """Return the plan of an allgather around the ring.

    INPUT is one block, and may be the memory of block `rank` of OUTPUT, which is `size` blocks: equal ones or, if
    `varying`, by the counts of the ranks.
    """
    check_ranks(size, rank, root)
    lane = (place_own(rank), *allgather_lane(size, rank, rank))
    return Plan("allgather", "ring", size, rank, root, even(1), shares(size, varying), lanes=(lane,))


def _reduce_scatter(size: int, rank: int) -> Lane:
    """Return size - 1 groups, after which block rank + 1 of OUTPUT is the result.

    The first group sends the rank's own contribution, straight from INPUT; the last one lowers.
    """
    last = size - 2
    middle = Repeat(last - 1, (_pass_on(size, rank, 1, output_block(rank - 1, advance=-1), advance=-1),))
    lane: Lane = (_pass_on(size, rank, 0, input_block(rank), lower=last == 0),)
    if middle.times > 0:
        lane += (middle,)
    if last > 0:
        lane += (_pass_on(size, rank, last, output_block(rank - last), lower=True),)
    return lane


def _pass_on(size: int, rank: int, step: int, partial: Span, *, lower: bool = False, advance: int = 0) -> Group:
    """Return the group that sends `partial` on and adds this rank's contribution to the block that comes after it."""
    block = rank - step - 1
    arriving = RecvReduce(
        (rank - 1) % size,
        dst=output_block(block, advance=advance),
        src=input_block(block, advance=advance),
        received_first=True,
        lower=lower,
    )
    return Group((Send((rank + 1) % size, partial), arriving))


def allgather_lane(size: int, rank: int, first: int) -> Lane:
    """Return size - 1 groups that carry block `first` of every rank's OUTPUT, rank plus a constant, to all others."""
    send = Send((rank + 1) % size, output_block(first, advance=-1))
    receive = Recv((rank - 1) % size, output_block(first - 1, advance=-1))
    return (Repeat(size - 1, (Group((send, receive)),)),) if size > 1 else ()
