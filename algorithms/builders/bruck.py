"""Bruck algorithms: every rank exchanges with the ranks at distances 1, k, k², … (k: the radix) and their multiples.

Allgather: a rank that has the blocks of the next d ranks receives the blocks of the d ranks after these from the rank
at distance d, and so on. This works for any number of ranks. Alltoall: a block that must travel a distance i is sent
once for each non-zero digit of i, to the base k. With radix 2, for example, a block with distance 5 travels 1 in one
round and 4 in another. One message carries all blocks that have the same digit in the same position.

Both suit short vectors, for which latency matters more than volume: they take ⌈log_k size⌉ rounds, with k - 1 messages
at once in each round.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.algorithms.builders.arguments import check_at_least, check_ranks
from unisono.algorithms.builders.lane_pieces import distances, with_own_block
from unisono.algorithms.ir.plan import (
    Buffer,
    Copy,
    Group,
    Lane,
    Plan,
    Recv,
    Repeat,
    Send,
    Step,
    even,
    input_block,
    output_block,
    scratch_block,
    scratch_like,
    shares,
)


def allgather_bruck(size: int, rank: int, root: int = 0, varying: bool = False, radix: int = 2) -> Plan:
    """Return the plan of an allgather in ⌈log_radix size⌉ rounds, for any number of ranks.

    INPUT is one block, and may be the memory of block `rank` of OUTPUT. OUTPUT is `size` blocks: equal ones or, if
    `varying`, by the counts of the ranks. The original algorithm rotates the blocks at the end. Here spans wrap around
    the end of OUTPUT, so no rotation is needed.
    """
    check_ranks(size, rank, root)
    check_at_least("radix", radix, 2)
    lane: Lane = ()
    for distance in distances(size, radix):
        steps: list[Step] = []
        for far in range(distance, min(radix * distance, size), distance):
            count = min(distance, size - far)
            steps.append(Send((rank - far) % size, output_block(rank, count)))
            steps.append(Recv((rank + far) % size, output_block(rank + far, count)))
        lane += (Group(tuple(steps)),)
    return Plan(
        "allgather", "bruck", size, rank, root, even(1), shares(size, varying), lanes=(with_own_block(rank, lane),)
    )


def alltoall_bruck(size: int, rank: int, root: int = 0, radix: int = 2) -> Plan:
    """Return the plan of an alltoall in ⌈log_radix size⌉ rounds, for any number of ranks.

    INPUT and OUTPUT are `size` equal blocks, and must not be the same memory. SCRATCH is twice that. Block rank - i of
    OUTPUT always holds the block that has a distance of i to travel. At the end, the block that belongs there is the
    one from rank rank - i. So the first copy, which reverses the vector, is the only local permutation.
    """
    check_ranks(size, rank, root)
    check_at_least("radix", radix, 2)
    lane: Lane = (Group((Copy(output_block(rank, size, stride=-1), input_block(rank, size)),)),)
    for distance in distances(size, radix):
        lane += _hop(size, rank, distance, radix)
    return Plan(
        collective="alltoall",
        algorithm="bruck",
        size=size,
        rank=rank,
        root=root,
        input=even(size),
        output=even(size),
        scratch=scratch_like(Buffer.INPUT, even(size), copies=2),
        lanes=(lane,),
    )


def _hop(size: int, rank: int, distance: int, radix: int) -> Lane:
    """Return the groups that move the blocks whose digit of weight `distance` is not 0 by that part of their distance.

    Blocks to send are packed into the first half of SCRATCH. Received blocks are unpacked from the second half.
    """
    pack: Lane = ()
    unpack: Lane = ()
    steps: list[Step] = []
    packed = 0
    for far in range(distance, min(radix * distance, size), distance):
        first = packed
        for start, count, times in _runs(size, far, distance, radix * distance):
            kept = output_block(rank - start, count, stride=-1, advance=-radix * distance)
            pack += _repeat(times, Copy(scratch_block(packed, count, advance=count), kept))
            unpack += _repeat(times, Copy(kept, scratch_block(size + packed, count, advance=count)))
            packed += times * count
        steps.append(Send((rank + far) % size, scratch_block(first, packed - first)))
        steps.append(Recv((rank - far) % size, scratch_block(size + first, packed - first)))
    return (*pack, Group(tuple(steps)), *unpack)


def _runs(size: int, first: int, length: int, period: int) -> Iterator[tuple[int, int, int]]:
    """Yield the numbers below `size` that, modulo `period`, lie in first … first + length - 1, as runs.

    A run (start, count, times) is the numbers start … start + count - 1, and `times` - 1 copies of it, each `period`
    further than the one before.
    """
    full = max(0, (size - first - length) // period + 1)
    if full:
        yield first, length, full
    last = first + full * period
    if last < size:
        yield last, size - last, 1


def _repeat(times: int, step: Step) -> Lane:
    group = Group((step,))
    return (group,) if times == 1 else (Repeat(times, (group,)),)
