"""Pairwise exchange: at distance d, every rank sends to the rank d after it and receives from the rank d before it.

Each distance is a permutation of the ranks, so no rank receives two messages of the same distance. The pairwise
algorithm goes through the distances one at a time. The direct algorithm has a window of distances under way at once,
which hides latencies without flooding a rank. Every block travels once, directly to its destination.
"""

from __future__ import annotations

from unisono.algorithms.builders.arguments import check_at_least, check_ranks
from unisono.algorithms.builders.lane_pieces import exchange_with_all, single_rank_lane
from unisono.algorithms.ir.plan import (
    Copy,
    Counts,
    Group,
    Lane,
    Partition,
    Plan,
    RecvReduce,
    Repeat,
    Send,
    Span,
    even,
    input_block,
    output_block,
    shares,
)


def alltoall_pairwise(size: int, rank: int, root: int = 0, varying: bool = False) -> Plan:
    """Return the plan of an alltoall in size - 1 rounds, in each of which a rank exchanges with two ranks.

    INPUT and OUTPUT are `size` blocks each: equal ones or, if `varying`, by the counts that this rank sends to and
    receives from each rank. They must not be the same memory.
    """
    return _alltoall("pairwise", size, rank, root, varying=varying, window=1)


def alltoall_direct(size: int, rank: int, root: int = 0, varying: bool = False, window: int = 32) -> Plan:
    """Return the plan of an alltoall that exchanges with `window` ranks at a time.

    Buffers are as in `alltoall_pairwise`.
    """
    check_at_least("window", window, 1)
    return _alltoall("direct", size, rank, root, varying=varying, window=window)


def _alltoall(algorithm: str, size: int, rank: int, root: int, *, varying: bool, window: int) -> Plan:
    check_ranks(size, rank, root)
    lane = exchange_with_all(
        size,
        rank,
        window,
        sent=lambda distance: input_block(rank + distance, advance=window),
        received=lambda distance: output_block(rank - distance, advance=-window),
        own=(Copy(output_block(rank), input_block(rank)),),
    )
    return Plan(
        collective="alltoall",
        algorithm=algorithm,
        size=size,
        rank=rank,
        root=root,
        input=Partition(size, Counts.SEND) if varying else even(size),
        output=Partition(size, Counts.RECEIVE) if varying else even(size),
        lanes=(lane,),
    )


def reduce_scatter_pairwise(size: int, rank: int, root: int = 0, varying: bool = False) -> Plan:
    """Return the plan of a reduce-scatter in size - 1 rounds, in each of which a rank exchanges with two ranks.

    INPUT is `size` blocks: equal ones or, if `varying`, by the counts of the ranks. OUTPUT is one block, and may be the
    memory of block `rank` of INPUT. There is no SCRATCH. Contributions are combined in descending order from the rank's
    own, modulo `size`.
    """
    check_ranks(size, rank, root)

    def at(distance: int, current: Span, advance: int = 0) -> Group:
        after, before = rank + distance, rank - distance
        send = Send(after % size, input_block(after, advance=advance), peer_advance=advance)
        lower = distance == size - 1
        combine = RecvReduce(before % size, output_block(), current, lower=lower, peer_advance=-advance)
        return Group((send, combine))

    lane: Lane = (at(1, input_block(rank)),) if size > 1 else single_rank_lane()
    lane += (Repeat(size - 3, (at(2, output_block(), advance=1),)),) if size > 3 else ()
    lane += (at(size - 1, output_block()),) if size > 2 else ()
    return Plan(
        collective="reduce_scatter",
        algorithm="pairwise",
        size=size,
        rank=rank,
        root=root,
        input=shares(size, varying),
        output=even(1),
        lanes=(lane,),
    )
