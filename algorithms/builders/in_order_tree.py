"""In-order binary trees: all ranks before a rank are in its left subtree, all after it in its right one.

So whatever a rank combines is a run of consecutive ranks, and the operation need not be commutative. No rank receives
from more than two others or sends to more than one, which suits long vectors in many segments. The tree of n positions
is the implicit one of the binary numbers 1 … n: the number of trailing zeros is the level of a position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unisono.algorithms.builders.arguments import check_ranks
from unisono.algorithms.builders.lane_pieces import alone, at_groups
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
    """Return the depth of the deepest position of the in-order tree of `size` positions, 1 at least."""
    return size.bit_length() - 1


def in_order_top(size: int) -> int:
    """Return the position at the top of the in-order tree of `size` positions."""
    return (1 << in_order_height(size)) - 1


def in_order_node(size: int, position: int) -> Node:
    """Return a position in the in-order tree of `size` positions."""
    depth, above = 0, _above(size, position)
    links = Links(() if above is None else (above,), tuple(_below(size, position)))
    while above is not None:
        depth, above = depth + 1, _above(size, above)
    return Node(depth, links)


def _above(size: int, position: int) -> int | None:
    """Return the position above: the number with one more trailing zero, or, beyond the end, the one it hangs from."""
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
    found = [position - half] if half else []
    while half and number + half > size:
        half //= 2
    return [*found, position + half] if half else found


def hang(node: Node, top: int, offset: int = 0) -> Node:
    """Return `node` of a tree whose positions are moved by `offset`, and whose top is hung under the position `top`."""
    above, below = (tuple(position + offset for position in positions) for positions in node.links)
    return Node(node.depth + 1, Links(above or (top,), below))


def reduce_binary(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of a reduce up an in-order binary tree with the root at its top, for any root.

    INPUT, and OUTPUT of the root, are one block each, and may be the same memory; SCRATCH holds what comes from the
    ranks below. Contributions are combined in ascending order.
    """
    check_ranks(size, rank, root)
    vector = even(1)
    node = _node_around(size, rank, root)
    height = in_order_height(max(root, size - 1 - root)) + 1 if size > 1 else 0
    up = reduce_up(node, rank, height, Place(output_block() if rank == root else scratch_block()))
    return Plan(
        collective="reduce",
        algorithm="binary",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=at_root(rank, root, vector),
        scratch=scratch_like(Buffer.INPUT, vector, copies=len(node.links.below)),
        lanes=(at_groups(up) if size > 1 else alone(),),
    )


def allreduce_reduce_broadcast(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of an allreduce as a reduce up an in-order binary tree and a broadcast down the same tree.

    INPUT and OUTPUT are one block each, and may be the same memory; SCRATCH holds what comes from the ranks below.
    Contributions are combined in ascending order. Over many segments, the broadcast overlaps with the reduce.
    """
    check_ranks(size, rank, root)
    vector = even(1)
    node, height = in_order_node(size, rank), in_order_height(size)
    place = Place(output_block())
    up_and_down = {**reduce_up(node, rank, height, place), **tell_down(node, 2 * height, place)}
    return Plan(
        collective="allreduce",
        algorithm="reduce_broadcast",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=vector,
        scratch=scratch_like(Buffer.INPUT, vector, copies=len(node.links.below)),
        lanes=(at_groups(up_and_down) if size > 1 else alone(),),
    )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tree lies in memory and on the ranks.

    Attributes:
        partial: where a rank's partial result goes, or its result.
        block, blocks: the block of INPUT that the tree is for, and the number of all blocks of INPUT.
        rank_at: the rank at a position.
    """

    partial: Span
    block: int = 0
    blocks: int = 1
    rank_at: Callable[[int], int] = lambda position: position

    def stage(self, index: int) -> Span:
        """Return where what comes from the `index`-th position below is received."""
        return scratch_block(index * self.blocks + self.block)


def reduce_up(node: Node, position: int, height: int, place: Place) -> dict[int, tuple[Step, ...]]:
    """Return the steps, by group, with which partial results flow up a tree of the given height, and are lowered.

    Links from depth d + 1 to depth d are used in group 2·(height - d - 1); the groups in between combine.
    """
    steps: dict[int, tuple[Step, ...]] = {}
    partial, own = place.partial, input_block(place.block)
    (above, below), last = node.links, 2 * (height - node.depth)
    if below:
        stages = [(other, place.stage(index)) for index, other in enumerate(below)]
        steps[last - 2] = tuple(Recv(place.rank_at(other), stage) for other, stage in stages)
        operands = sorted([*stages, (position, own)], key=lambda operand: operand[0])
        steps[last - 1] = (Reduce(partial, tuple(operand for _, operand in operands), lower=not above),)
    if above:
        steps[last] = (Send(place.rank_at(above[0]), partial if below else own),)
    return steps


def tell_down(node: Node, first: int, place: Place) -> dict[int, tuple[Step, ...]]:
    """Return the steps, by group from `first`, with which the result at the top of a tree flows down it."""
    steps: dict[int, tuple[Step, ...]] = {}
    if node.links.above:
        steps[first + node.depth - 1] = (Recv(place.rank_at(node.links.above[0]), place.partial),)
    if node.links.below:
        steps[first + node.depth] = tuple(Send(place.rank_at(other), place.partial) for other in node.links.below)
    return steps


def _node_around(size: int, rank: int, root: int) -> Node:
    """Return a rank in the in-order tree with the root at its top: two in-order trees hang under it."""
    sides = [side for side in (range(root), range(root + 1, size)) if side]
    for side in sides:
        if rank in side:
            return hang(in_order_node(len(side), rank - side.start), root, side.start)
    return Node(0, Links((), tuple(side.start + in_order_top(len(side)) for side in sides)))
