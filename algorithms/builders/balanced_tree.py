"""The canonical order of combination: one balanced binary tree over the ranks, the same for every block.

Neighbouring ranks are combined in pairs, then neighbouring pairs, and so on. A value without a neighbour moves up to
the next level. Block b travels from all ranks to rank b, which combines the contributions in this order. In an
allreduce, the result travels back to all ranks. This is the least possible volume. If all ranks fit into one window,
each way takes one message latency.
"""

from __future__ import annotations

from unisono.algorithms.builders.arguments import check_at_least, check_ranks
from unisono.algorithms.builders.lane_pieces import distances, exchange_with_all, single_rank_lane
from unisono.algorithms.ir.plan import (
    Buffer,
    Copy,
    Group,
    Lane,
    Plan,
    Reduce,
    Span,
    even,
    input_block,
    output_block,
    scratch_block,
    scratch_like,
    scratch_like_block,
    shares,
)


def allreduce_balanced_tree(size: int, rank: int, root: int = 0, window: int = 32) -> Plan:
    """Return the plan of an allreduce in the canonical order, by two direct exchanges with `window` ranks at a time.

    INPUT and OUTPUT are cut into `size` blocks, and may be the same memory. SCRATCH is `size` copies of block `rank`.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)
    vector = even(size)
    lane = (*_scatter(size, rank, window), *_combine(size, rank, output_block(rank)), *_gather(size, rank, window))
    return Plan(
        collective="allreduce",
        algorithm="balanced_tree",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=vector,
        scratch=scratch_like_block(Buffer.INPUT, vector, rank, copies=size if size > 1 else 0),
        lanes=(lane if size > 1 else single_rank_lane(),),
    )


def reduce_scatter_balanced_tree(size: int, rank: int, root: int = 0, varying: bool = False, window: int = 32) -> Plan:
    """Return the plan of a reduce-scatter in the canonical order, by a direct exchange with `window` ranks at a time.

    INPUT is `size` blocks: equal ones or, if `varying`, by the counts of the ranks. OUTPUT is one block, and may be the
    memory of block `rank` of INPUT. SCRATCH is `size` copies of OUTPUT.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)
    lane = (*_scatter(size, rank, window), *_combine(size, rank, output_block()))
    return Plan(
        collective="reduce_scatter",
        algorithm="balanced_tree",
        size=size,
        rank=rank,
        root=root,
        input=shares(size, varying),
        output=even(1),
        scratch=scratch_like(Buffer.OUTPUT, even(1), copies=size if size > 1 else 0),
        lanes=(lane if size > 1 else single_rank_lane(),),
    )


def _scatter(size: int, rank: int, window: int) -> Lane:
    """Return the groups that send every rank its block, and receive the rank's own block from all ranks in SCRATCH."""
    arrive = exchange_with_all(
        size,
        rank,
        window,
        sent=lambda distance: input_block(rank + distance, advance=window),
        received=lambda distance: scratch_block(rank - distance, advance=-window),
    )
    return (*arrive, Group((Copy(scratch_block(rank), input_block(rank)),)))


def _combine(size: int, rank: int, result: Span) -> Lane:
    """Return one group for each level of the tree, which combines all its pairs. The last group writes `result`.

    The partial result of a run of ranks replaces the contribution of its first rank.
    """
    lane: Lane = ()
    for distance in distances(size, 2):
        pairs = len(range(distance, size, 2 * distance))
        left, right = (scratch_block(side, pairs, 2 * distance) for side in (0, distance))
        is_last = 2 * distance >= size
        reduce = Reduce(result if is_last else left, (left, right), lower=is_last)
        lane = (*lane, Group((reduce,)))
    return lane


def _gather(size: int, rank: int, window: int) -> Lane:
    """Return the groups that send the rank's block of the result to all ranks, and receive their blocks."""
    return exchange_with_all(
        size,
        rank,
        window,
        sent=lambda distance: output_block(rank),
        received=lambda distance: output_block(rank - distance, advance=-window),
    )
