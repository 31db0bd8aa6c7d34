"""In-order binary trees: all ranks before a rank are in its left subtree, and all ranks after it in its right one.

So every partial result covers consecutive ranks, and the operation need not be commutative. No rank receives from more
than two ranks or sends to more than one, which suits long vectors in many segments.

The tree of n positions is defined by the binary numbers 1 … n. The number of trailing zeros of a number is the level of
its position. With 7 positions, for example, position 3 (number 4) is the top, positions 1 and 5 are below it, and the
even positions are leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unisono.algorithms.builders.arguments import check_ranks
from unisono.algorithms.builders.lane_pieces import lane_from_steps, single_rank_lane
from unisono.algorithms.builders.tree import Links, Node, at_root
from unisono.algorithms.ir.plan import (
    Buffer,
    Plan,
    Recv,
    Reduce,
    Send,
    Span,
    Step,
    even,
    input_block,
    output_block,
    scratch_block,
    scratch_like,
)


def in_order_height(size: int) -> int:
    """Return the depth of the deepest position in the in-order tree of `size` positions, for `size` of at least 1."""
    return size.bit_length() - 1


def in_order_top(size: int) -> int:
    """Return the top position of the in-order tree of `size` positions."""
    return (1 << in_order_height(size)) - 1


def in_order_node(size: int, position: int) -> Node:
    """Return the node of a position in the in-order tree of `size` positions."""
    depth, above = 0, _above(size, position)
    links = Links(() if above is None else (above,), tuple(_below(size, position)))
    while above is not None:
        depth, above = depth + 1, _above(size, above)
    return Node(depth, links)


def _above(size: int, position: int) -> int | None:
    """Return the position above: the number with one more trailing zero or, if that is beyond the end, its ancestor."""
    number = position + 1
    unit = number & -number
    if number == 1 << in_order_height(size):
        return None
    above = (number ^ unit) | (unit << 1)
    return (above if above <= size else number ^ unit) - 1


def _below(size: int, position: int) -> list[int]:
    """Return the positions below: the left one, and the right one if there are positions after this one."""
    number = position + 1
    half = (number & -number) // 2
    left = [position - half] if half else []
    while half and number + half > size:
        half //= 2
    return [*left, position + half] if half else left


def hang(node: Node, top: int, offset: int = 0) -> Node:
    """Return `node` of a tree whose positions are shifted by `offset`, with the tree's top below position `top`."""
    above, below = (tuple(position + offset for position in positions) for positions in node.links)
    return Node(node.depth + 1, Links(above or (top,), below))


def reduce_binary(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of a reduce up an in-order binary tree with the root at its top, for any root.

    INPUT and the root's OUTPUT are one block each, and may be the same memory. SCRATCH holds the messages from the
    ranks below. Contributions are combined in ascending order.
    """
    check_ranks(size, rank, root)
    vector = even(1)
    node = _node_around(size, rank, root)
    height = in_order_height(max(root, size - 1 - root)) + 1 if size > 1 else 0
    up = reduce_up(node, rank, height, TreeLayout(output_block() if rank == root else scratch_block()))
    return Plan(
        collective="reduce",
        algorithm="binary",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=at_root(rank, root, vector),
        scratch=scratch_like(Buffer.INPUT, vector, copies=len(node.links.below)),
        lanes=(lane_from_steps(up) if size > 1 else single_rank_lane(),),
    )


def allreduce_reduce_broadcast(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of an allreduce as a reduce up an in-order binary tree and a broadcast down the same tree.

    INPUT and OUTPUT are one block each, and may be the same memory. SCRATCH holds the messages from the ranks below.
    Contributions are combined in ascending order. Over many segments, the broadcast overlaps with the reduce.
    """
    check_ranks(size, rank, root)
    vector = even(1)
    node, height = in_order_node(size, rank), in_order_height(size)
    layout = TreeLayout(output_block())
    up_and_down = {**reduce_up(node, rank, height, layout), **broadcast_down(node, 2 * height, layout)}
    return Plan(
        collective="allreduce",
        algorithm="reduce_broadcast",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=vector,
        scratch=scratch_like(Buffer.INPUT, vector, copies=len(node.links.below)),
        lanes=(lane_from_steps(up_and_down) if size > 1 else single_rank_lane(),),
    )


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """The memory and the ranks of a tree.

    Attributes:
        partial: where a rank writes its partial result or the result.
        block, blocks: the block of INPUT on which the tree works, and the number of blocks of INPUT.
        rank_at: the function from positions to ranks.
    """

    partial: Span
    block: int = 0
    blocks: int = 1
    rank_at: Callable[[int], int] = lambda position: position

    def stage(self, index: int) -> Span:
        """Return the block of SCRATCH that receives from the `index`-th position below."""
        return scratch_block(index * self.blocks + self.block)


def reduce_up(node: Node, position: int, height: int, layout: TreeLayout) -> dict[int, tuple[Step, ...]]:
    """Return the steps, by number of group, that carry partial results up a tree of this height, and lower the result.

    Links from depth d + 1 to depth d are used in group 2·(height - d - 1); the groups between combine.
    """
    steps: dict[int, tuple[Step, ...]] = {}
    partial, own = layout.partial, input_block(layout.block)
    (above, below), last = node.links, 2 * (height - node.depth)
    if below:
        stages = [(other, layout.stage(index)) for index, other in enumerate(below)]
        steps[last - 2] = tuple(Recv(layout.rank_at(other), stage) for other, stage in stages)
        operands = sorted([*stages, (position, own)], key=lambda operand: operand[0])
        steps[last - 1] = (Reduce(partial, tuple(operand for _, operand in operands), lower=not above),)
    if above:
        steps[last] = (Send(layout.rank_at(above[0]), partial if below else own),)
    return steps


def broadcast_down(node: Node, first: int, layout: TreeLayout) -> dict[int, tuple[Step, ...]]:
    """Return the steps, by number of group from `first` on, that carry the result at the top down the tree."""
    steps: dict[int, tuple[Step, ...]] = {}
    if node.links.above:
        steps[first + node.depth - 1] = (Recv(layout.rank_at(node.links.above[0]), layout.partial),)
    if node.links.below:
        steps[first + node.depth] = tuple(Send(layout.rank_at(other), layout.partial) for other in node.links.below)
    return steps


def _node_around(size: int, rank: int, root: int) -> Node:
    """Return the node of a rank in the tree with the root at its top, below which two in-order trees hang."""
    sides = [side for side in (range(root), range(root + 1, size)) if side]
    for side in sides:
        if rank in side:
            return hang(in_order_node(len(side), rank - side.start), root, side.start)
    return Node(0, Links((), tuple(side.start + in_order_top(len(side)) for side in sides)))
