"""Dissemination: in round i every rank tells k - 1 others that it, and all it has heard of, have come.

The others are k^i, 2·k^i, … ranks further, where k is the radix; after ⌈log_k size⌉ rounds all have heard of all. No
rank is special, and no number of ranks is.
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

    A message needs a byte to be sent at all, so INPUT is a token of one element, of any value, which the executor
    provides; SCRATCH receives the radix - 1 tokens of a round; there is no OUTPUT.
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
