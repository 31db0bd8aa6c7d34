"""The balanced tree: the order of combination that results do not depend on the number of hosts or the algorithm for.

The canonical order pairs neighbouring ranks, then neighbouring pairs, and so on; what has no neighbour waits for the
next level. Here every block travels to the rank of its number from all others at once, is combined there in this order,
and travels back: the least possible volume, in two message latencies.
"""

from __future__ import annotations

from unisono.algorithms.checks import check_ranks
from unisono.algorithms.lanes import alone, distances
from unisono.algorithms.plan import (
    Buffer,
    Copy,
    Group,
    Lane,
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


def allreduce_balanced_tree(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of an allreduce in the canonical order, by two direct exchanges of blocks.

    INPUT and OUTPUT are cut into `size` blocks, and may be the same memory; SCRATCH is one copy of INPUT for each rank,
    of which only block `rank` is used.
    """
    check_ranks(size, rank, root)
    vector = even(size)
    return Plan(
        collective="allreduce",
        algorithm="balanced_tree",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=vector,
        scratch=scratch_like(Buffer.INPUT, vector, copies=size if size > 1 else 0),
        lanes=((_scatter(size, rank), *_combine(size, rank), _gather(size, rank)) if size > 1 else alone(),),
    )


def _scatter(size: int, rank: int) -> Group:
    """Return the group that sends every rank its block, and receives one's own from all in SCRATCH."""
    others = [(rank + distance) % size for distance in range(1, size)]
    steps: list[Step] = [Send(peer, input_block(peer)) for peer in others]
    steps += [Recv(peer, scratch_block(peer * size + rank)) for peer in others]
    return Group((*steps, Copy(scratch_block(rank * size + rank), input_block(rank))))


def _combine(size: int, rank: int) -> Lane:
    """Return a group per level of the tree, which combines all its pairs; the last one leaves the result in OUTPUT.

    The partial result of a run of ranks is where the contribution of its first rank was.
    """
    lane: Lane = ()
    for distance in distances(size, 2):
        pairs = len(range(distance, size, 2 * distance))
        left, right = (scratch_block(rank + side * size, pairs, 2 * distance * size) for side in (0, distance))
        is_last = 2 * distance >= size
        reduce = Reduce(output_block(rank) if is_last else left, (left, right), lower=is_last)
        lane = (*lane, Group((reduce,)))
    return lane


def _gather(size: int, rank: int) -> Group:
    """Return the group that sends one's block of the result to all, and receives theirs."""
    others = [(rank + distance) % size for distance in range(1, size)]
    sends = [Send(peer, output_block(rank)) for peer in others]
    return Group((*sends, *(Recv(peer, output_block(peer)) for peer in others)))
