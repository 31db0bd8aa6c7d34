"""Dissemination: in round i, every rank sends a token to k - 1 ranks. The token stands for all ranks it has heard from.

The k - 1 ranks are k^i, 2·k^i, … ranks further, where k is the radix. After ⌈log_k size⌉ rounds every rank has heard
from all others, directly or through others. All ranks do the same, and any number of ranks works.
"""

from __future__ import annotations

from unisono.algorithms.builders.arguments import check_at_least, check_ranks
from unisono.algorithms.builders.lane_pieces import distances
from unisono.algorithms.ir.plan import (
    Buffer,
    Group,
    Lane,
    Partition,
    Plan,
    Recv,
    Send,
    Step,
    even,
    input_block,
    scratch_block,
    scratch_like,
)


def barrier_dissemination(size: int, rank: int, root: int = 0, radix: int = 2) -> Plan:
    """Return the plan of a barrier: no rank ends before every rank has begun.

    INPUT is a token of one element with any value, which the executor provides, because a message of zero bytes is not
    sent. SCRATCH receives the radix - 1 tokens of a round. There is no OUTPUT.
    """
    check_ranks(size, rank, root)
    check_at_least("radix", radix, 2)
    lane: Lane = ()
    for distance in distances(size, radix):
        steps: list[Step] = []
        for index, far in enumerate(range(distance, min(radix * distance, size), distance)):
            steps += [Send((rank + far) % size, input_block()), Recv((rank - far) % size, scratch_block(index))]
        lane += (Group(tuple(steps)),)
    token = even(1)
    return Plan(
        collective="barrier",
        algorithm="dissemination",
        size=size,
        rank=rank,
        root=root,
        input=token,
        output=Partition(0),
        scratch=scratch_like(Buffer.INPUT, token, copies=radix - 1),
        lanes=(lane,),
    )
