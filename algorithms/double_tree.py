"""Double binary tree: two binary trees over the same ranks, each for one half of the vector.

A rank that sends to two others in one tree is a leaf in the other, so nobody sends or receives more than the vector,
and the depth is logarithmic: in many segments, the bandwidth of a chain with the latency of a tree.

The root stands above both trees. The other ranks are *labels* 1 … m in the first tree, in which the odd ones are the
leaves, and the same labels shifted by one in the second. Reference: Sanders, Speck, Träff 2009.
"""

from __future__ import annotations

from unisono.algorithms.checks import check_ranks
from unisono.algorithms.plan import Lane, Plan, even, output_block
from unisono.algorithms.tree import Links, Node, at_root, flow_down, source_of_broadcast


def broadcast_double_binary_tree(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of a broadcast down two trees, a lane each.

    The data is the INPUT of the root, two blocks; all other ranks have no INPUT. Every rank ends with it in OUTPUT: the
    root copies it there, which executors skip when both are the same memory.
    """
    check_ranks(size, rank, root)

    def lane(half: int) -> Lane:
        source, target = source_of_broadcast(rank, root, half), output_block(half)
        node = tree_node(size, (rank - root) % size, shift=half)
        return flow_down(node, lambda position: (root + position) % size, source, target)

    lanes = (lane(0), lane(1))
    return Plan(
        collective="broadcast",
        algorithm="double_binary_tree",
        size=size,
        rank=rank,
        root=root,
        input=at_root(rank, root, even(2)),
        output=even(2),
        lanes=lanes,
    )


def tree_node(size: int, position: int, shift: int) -> Node:
    """Return a position in one of the two trees, which labels positions 1 … size - 1 shifted by `shift`.

    Position 0 is on top. Below it is the tree over all labels.
    """
    labels = size - 1

    def position_of(label: int) -> int:
        return (label - 1 + shift) % labels + 1

    if position == 0:
        return Node(0, Links((), tuple(position_of(label) for label in _tops((0, labels)))))
    low, high = 0, labels
    depth, above = 1, 0
    label = (position - 1 - shift) % labels + 1
    while (top := low + _power_of_two(high - low)) != label:
        depth, above = depth + 1, position_of(top)
        low, high = (low, top - 1) if label < top else (top, high)
    below = _tops((low, top - 1), (top, high))
    return Node(depth, Links((above,), tuple(position_of(label) for label in below)))


def _tops(*intervals: tuple[int, int]) -> list[int]:
    """Return the label on top of the tree over the labels low + 1 … high, for each interval that is not empty."""
    return [low + _power_of_two(high - low) for low, high in intervals if high > low]


def _power_of_two(count: int) -> int:
    """Return the largest power of two that is at most `count`."""
    return 1 << (count.bit_length() - 1)
