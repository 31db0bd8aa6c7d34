"""Bruck algorithms: every rank exchanges with the ranks at distances 1, k, k², … (k: the radix) and their multiples.

Allgather: a rank that has the blocks of the next d ranks gets those of the d ranks after these from the rank at
distance d, and so on, at any number of ranks. Alltoall: the block that is to travel a distance i is sent on once for
each digit of i that is not 0, together with all others that have that digit there.

Both are for short vectors, whose latencies outweigh their bytes: ⌈log_k size⌉ rounds, of k - 1 messages at once each.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.algorithms.builders.arguments import check_at_least, check_ranks
from unisono.algorithms.builders.lane_pieces import distances, share_own
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
    """Return the plan of an allgather in ⌈log_radix size⌉ rounds, at any number of ranks.

    INPUT is one block, and may be the memory of block `rank` of OUTPUT, which is `size` blocks: equal ones or, if
    `varying`, by the counts of the ranks. Spans that wrap around the end of OUTPUT spare the rotation of the original.
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
    return Plan("allgather", "bruck", size, rank, root, even(1), shares(size, varying), lanes=(share_own(rank, lane),))


def alltoall_bruck(size: int, rank: int, root: int = 0, radix: int = 2) -> Plan:
    """Return the plan of an alltoall in ⌈log_radix size⌉ rounds, at any number of ranks.

    INPUT and OUTPUT are `size` equal blocks, and must not be the same memory; SCRATCH is twice that. Block rank - i of
    OUTPUT is where the rank keeps, all the time, the block that has a distance of i to travel, because in the end that
    is the block from rank - i. So the one local permutation is the first copy, which turns the vector around.
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
    """Return the groups in which the blocks whose digit of weight `distance` is not 0 travel that part of their way.

    What leaves is packed into the first half of SCRATCH, and what arrives is unpacked from the second half.
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
    """Yield the numbers below `size` that lie in first … first + length - 1, modulo `period`, as runs of neighbours.

    A run (start, count, times) is start … start + count - 1, and `times` - 1 more of them, each `period` further.
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
