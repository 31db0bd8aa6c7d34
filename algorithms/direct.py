"""Direct exchange: every rank sends what it has to every other rank, and each makes the whole result itself.

Allreduce: one message latency whatever the number of ranks, and one rounding whatever the dtype, because a single n-ary
`Reduce` combines all contributions in ascending rank order. The volume grows with the number of ranks, so this is for
vectors whose latency outweighs their bytes, and for results that must not depend on anything but the ranks. Allgather:
every block travels once, and with a window of ranks at a time none of them is flooded.
"""

from __future__ import annotations

from unisono.algorithms.checks import check_at_least, check_ranks
from unisono.algorithms.lanes import alone, in_windows, place_own
from unisono.algorithms.plan import (
    Buffer,
    Copy,
    Group,
    Plan,
    Recv,
    Reduce,
    Send,
    Step,
    even,
    input_block,
    output_block,
    scratch_block,
    scratch_like,
    shares,
)


def allreduce_direct(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of an allreduce by direct exchange.

    INPUT and OUTPUT are one block each and may be the same memory; SCRATCH holds one copy of INPUT for each other rank,
    in ascending rank order. The result is the same on all ranks to the bit, and rounded once.
    """
    check_ranks(size, rank, root)
    # Each rank starts with its successor, so that no rank is everybody's first destination.
    others = [(rank + distance) % size for distance in range(1, size)]
    exchange: list[Step] = [Send(peer, input_block()) for peer in others]
    exchange += [Recv(peer, scratch_block(_copy_of(peer, rank))) for peer in others]
    sources = tuple(input_block() if peer == rank else scratch_block(_copy_of(peer, rank)) for peer in range(size))
    finish = Reduce(output_block(), sources, lower=True) if others else Copy(output_block(), input_block(), lower=True)
    groups = (Group(tuple(exchange)), Group((finish,))) if others else (Group((finish,)),)
    vector = even(1)
    return Plan(
        collective="allreduce",
        algorithm="direct",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=vector,
        scratch=scratch_like(Buffer.INPUT, vector, copies=size - 1),
        lanes=(groups,),
    )


def reduce_scatter_direct(size: int, rank: int, root: int = 0, varying: bool = False) -> Plan:
    """Return the plan of a reduce-scatter by direct exchange.

    INPUT is `size` blocks, by the counts of the ranks if `varying`; OUTPUT is one block, and may be the memory of block
    `rank` of INPUT; SCRATCH holds one copy of OUTPUT for each other rank, in ascending rank order. Contributions are
    combined at once and in that order.
    """
    check_ranks(size, rank, root)
    others = [(rank + distance) % size for distance in range(1, size)]
    exchange: list[Step] = [Send(peer, input_block(peer)) for peer in others]
    exchange += [Recv(peer, scratch_block(_copy_of(peer, rank))) for peer in others]
    sources = (scratch_block(_copy_of(peer, rank)) if peer != rank else input_block(rank) for peer in range(size))
    lane = (Group(tuple(exchange)), Group((Reduce(output_block(), tuple(sources), lower=True),)))
    return Plan(
        collective="reduce_scatter",
        algorithm="direct",
        size=size,
        rank=rank,
        root=root,
        input=shares(size, varying),
        output=even(1),
        scratch=scratch_like(Buffer.OUTPUT, even(1), copies=size - 1),
        lanes=(lane if others else alone(),),
    )


def allgather_direct(size: int, rank: int, root: int = 0, varying: bool = False, window: int = 32) -> Plan:
    """Return the plan of an allgather by direct exchange, with `window` ranks at a time.

    INPUT is one block, and may be the memory of block `rank` of OUTPUT, which is `size` blocks: equal ones or, if
    `varying`, by the counts of the ranks.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)

    def batch(first: int, number: int) -> Group:
        steps: list[Step] = []
        for distance in range(first + 1, first + 1 + number):
            after, before = rank + distance, rank - distance
            steps.append(Send(after % size, input_block(), peer_advance=window))
            steps.append(Recv(before % size, output_block(before, advance=-window), peer_advance=-window))
        return Group(tuple(steps))

    lane = (*in_windows(size - 1, window, batch), place_own(rank))
    return Plan("allgather", "direct", size, rank, root, even(1), shares(size, varying), lanes=(lane,))


def _copy_of(peer: int, rank: int) -> int:
    """Return the copy in SCRATCH that holds the contribution of `peer`; a rank keeps no copy of its own."""
    return peer if peer < rank else peer - 1
