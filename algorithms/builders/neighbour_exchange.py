"""Neighbour exchange: ranks exchange with their left and right neighbours in turn, two blocks at a time.

After the first exchange, each pair of ranks 2i and 2i + 1 has both blocks of the pair. From then on, every rank sends
to one neighbour the two blocks that it has received from the other one. This takes half the rounds of a ring for the
same volume.
"""

from __future__ import annotations

from unisono.algorithms.builders.arguments import check_ranks, check_supported, needs_even
from unisono.algorithms.builders.lane_pieces import with_own_block
from unisono.algorithms.ir.plan import (
    Group,
    Lane,
    Plan,
    Recv,
    Repeat,
    Send,
    even,
    output_block,
    shares,
)


def allgather_neighbour_exchange(size: int, rank: int, root: int = 0, varying: bool = False) -> Plan:
    """Return the plan of an allgather by neighbour exchange, for an even number of ranks.

    INPUT is one block, and may be the memory of block `rank` of OUTPUT. OUTPUT is `size` blocks: equal ones or, if
    `varying`, by the counts of the ranks. Reference: Chen, Zhang, Zhang, Yuan 2005.

    Raises:
        UsageError: `size` is odd.
    """
    check_ranks(size, rank, root)
    check_supported(needs_even(size))
    lane = with_own_block(rank, _exchanges(size, rank))
    return Plan("allgather", "neighbour_exchange", size, rank, root, even(1), shares(size, varying), lanes=(lane,))


def _exchanges(size: int, rank: int) -> Lane:
    """Return size / 2 groups: the exchange within the pair, then outside and inside the pair in turn.

    The two blocks that arrive lie alternately on either side of the rank, each time one pair further away.
    """
    side = 1 if rank % 2 == 0 else -1  # the direction of the other rank of the pair
    inside, outside = (rank + side) % size, (rank - side) % size
    first = rank - rank % 2  # the first block of the pair
    further = 2 * side
    own = Group((Send(inside, output_block(rank)), Recv(inside, output_block(rank + side))))

    def exchange(peer: int, sent: int, received: int, advance: int) -> Group:
        send = Send(peer, output_block(sent, count=2, advance=advance))
        return Group((send, Recv(peer, output_block(received, count=2, advance=-advance))))

    outwards = exchange(outside, first, first - further, further)
    inwards = exchange(inside, first - further, first + further, -further)
    twice, once = divmod(size // 2 - 1, 2)
    lane: Lane = (own, Repeat(twice, (outwards, inwards))) if twice else (own,)
    return (*lane, exchange(outside, first + twice * further, first - (twice + 1) * further, 0)) if once else lane
