"""Direct exchange: every rank sends its vector to every other rank, and each computes the whole result itself.

One message latency whatever the number of ranks, and one rounding whatever the dtype, because a single n-ary `Reduce`
combines all contributions in ascending rank order. The volume grows with the number of ranks, so this is for vectors
whose latency outweighs their bytes, and for results that must not depend on anything but the ranks.
"""

from __future__ import annotations

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
)


def allreduce_direct(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of an allreduce by direct exchange.

    INPUT and OUTPUT are one block each and may be the same memory; SCRATCH holds one copy of INPUT for each other rank,
    in ascending rank order. The result is the same on all ranks to the bit, and rounded once.
    """
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


def _copy_of(peer: int, rank: int) -> int:
    """Return the copy in SCRATCH that holds the contribution of `peer`; a rank keeps no copy of its own."""
    return peer if peer < rank else peer - 1
