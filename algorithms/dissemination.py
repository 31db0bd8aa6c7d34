"""Dissemination: in round k every rank tells the rank 2^k after it that it, and all it has heard of, have come.

After ⌈log2 size⌉ rounds all have heard of all. No rank is special, and no number of ranks is.
"""

from __future__ import annotations

from unisono.algorithms.plan import (
    Buffer,
    Group,
    Partition,
    Plan,
    Recv,
    Send,
    even,
    input_block,
    scratch_block,
    scratch_like,
)


def barrier_dissemination(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of a barrier: no rank ends before every rank has begun.

    A message needs a byte to be sent at all, so INPUT is a token of one element, of any value, which the executor
    provides; SCRATCH receives the tokens of others; there is no OUTPUT.
    """
    distances = [1 << bit for bit in range((size - 1).bit_length())]
    lane = tuple(
        Group((Send((rank + distance) % size, input_block()), Recv((rank - distance) % size, scratch_block())))
        for distance in distances
    )
    token = even(1)
    return Plan(
        collective="barrier",
        algorithm="dissemination",
        size=size,
        rank=rank,
        root=root,
        input=token,
        output=Partition(0),
        scratch=scratch_like(Buffer.INPUT, token),
        lanes=(lane,),
    )
