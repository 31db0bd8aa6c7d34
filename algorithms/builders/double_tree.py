"""Double binary tree: two binary trees over the same ranks, each for one half of the vector.

An inner rank of a binary tree moves three vectors while a leaf moves one. So a single tree leaves half of the links
idle. The leaves of an in-order tree are its even positions. In the second tree all ranks are shifted by one position,
so that no rank is an inner rank in both trees. Every rank then moves about two vectors, and the depth is logarithmic.
With many segments, this has the bandwidth of a chain and the latency of a tree. Reference: Sanders, Speck, Träff 2009.
"""

from __future__ import annotations

from collections.abc import Callable

from unisono.algorithms.builders.arguments import check_ranks
from unisono.algorithms.builders.in_order_tree import (
    TreeLayout,
    broadcast_down,
    hang,
    in_order_height,
    in_order_node,
    in_order_top,
    reduce_up,
)
from unisono.algorithms.builders.lane_pieces import lane_from_steps, single_rank_lane
from unisono.algorithms.builders.tree import Links, Node, at_root, flow_down, source_of_broadcast
from unisono.algorithms.ir.plan import (
    Buffer,
    Lane,
    Plan,
    Span,
    even,
    output_block,
    scratch_like,
)

_TREES = 2


def allreduce_double_binary_tree(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of an allreduce up and down two binary trees, for any number of ranks.

    INPUT and OUTPUT are two blocks each, one for each tree and lane, and may be the same memory. SCRATCH holds the
    messages from the ranks below.
    """
    check_ranks(size, rank, root)
    height = in_order_height(size)

    def lane(tree: int) -> Lane:
        position = (rank + tree) % size
        node = in_order_node(size, position)
        layout = TreeLayout(output_block(tree), tree, _TREES, lambda other: (other - tree) % size)
        return lane_from_steps(
            {**reduce_up(node, position, height, layout), **broadcast_down(node, 2 * height, layout)}
        )

    vector = even(_TREES)
    return Plan(
        collective="allreduce",
        algorithm="double_binary_tree",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=vector,
        scratch=scratch_like(Buffer.INPUT, vector, copies=2 if size > 1 else 0),
        lanes=tuple(lane(tree) for tree in range(_TREES)) if size > 1 else (single_rank_lane(_TREES),),
    )


def reduce_double_binary_tree(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of a reduce up two binary trees of the other ranks, whose tops send to the root.

    INPUT and the root's OUTPUT are two blocks each, one for each tree and lane, and may be the same memory. SCRATCH
    holds the messages from the ranks below.
    """
    check_ranks(size, rank, root)
    height = in_order_height(size - 1) + 1

    def lane(tree: int) -> Lane:
        position, node, rank_at = _under_root(size, rank, root, tree)
        partial = Span(Buffer.OUTPUT if rank == root else Buffer.SCRATCH, tree)
        return lane_from_steps(reduce_up(node, position, height, TreeLayout(partial, tree, _TREES, rank_at)))

    vector = even(_TREES)
    return Plan(
        collective="reduce",
        algorithm="double_binary_tree",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=at_root(rank, root, vector),
        scratch=scratch_like(Buffer.INPUT, vector, copies=2 if size > 1 else 0),
        lanes=tuple(lane(tree) for tree in range(_TREES)) if size > 1 else (single_rank_lane(_TREES),),
    )


def broadcast_double_binary_tree(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of a broadcast down two binary trees of the other ranks, with the root above both.

    The data is the INPUT of the root, two blocks; the other ranks have no INPUT. Every rank ends with the data in
    OUTPUT. The root copies it there; executors skip the copy if INPUT and OUTPUT are the same memory.
    """
    check_ranks(size, rank, root)

    def lane(tree: int) -> Lane:
        _, node, rank_at = _under_root(size, rank, root, tree)
        return flow_down(node, rank_at, source_of_broadcast(rank, root, tree), output_block(tree))

    return Plan(
        collective="broadcast",
        algorithm="double_binary_tree",
        size=size,
        rank=rank,
        root=root,
        input=at_root(rank, root, even(_TREES)),
        output=even(_TREES),
        lanes=tuple(lane(tree) for tree in range(_TREES)),
    )


def _under_root(size: int, rank: int, root: int, tree: int) -> tuple[int, Node, Callable[[int], int]]:
    """Return the position of a rank in one of the two trees, its node there, and the function from positions to ranks.

    The members of the tree are the other ranks, in order after the root, modulo `size`. The position of the root comes
    after theirs.
    """
    others = size - 1

    def rank_at(position: int) -> int:
        return root if position == others else (root + 1 + (position - tree) % others) % size

    if rank == root:
        return others, Node(0, Links((), (in_order_top(others),) if others else ())), rank_at
    position = ((rank - root - 1) % size + tree) % others
    return position, hang(in_order_node(others, position), others), rank_at
