"""Plans for grids of ranks: the vector is cut into equal parts, and each part takes its own way through the grid.

Ranks stand on a grid whose dimensions have the lengths `dims`, and that wraps around, as a torus does. The first
dimension is the innermost one: the coordinates of a rank are the digits of its number, lowest first. A *part* of the
vector has a lane and a *course*: the order of the dimensions, and the direction along each. The parts together can
therefore use all links of the grid at once: a grid of n dimensions has 2n links at each rank, and takes 2n parts.

A course puts the ranks into an order. The number of a rank in this order is its *position*, and a part has one block
for each position. The blocks with which a rank deals in one step are then consecutive. If blocks belong to ranks, as in
an allgather, the plan has a permutation, from positions to ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

from unisono.algorithms.builders.arguments import check_parts, check_ranks
from unisono.algorithms.builders.lane_pieces import single_rank_lane
from unisono.algorithms.ir.plan import (
    Buffer,
    Copy,
    Group,
    Lane,
    Partition,
    Plan,
    Send,
    even,
    in_parts,
    input_block,
    output_block,
    scratch_like,
    shares,
)
from unisono.errors import UsageError


class Course(NamedTuple):
    """The way of one part of the vector: the dimensions in order, and 1 or -1 as the direction along all of them."""

    dimensions: tuple[int, ...]
    direction: int


class GridArguments(NamedTuple):
    """The arguments that all plans for grids share.

    Attributes:
        algorithm, size, rank, root: as in `Plan`.
        lanes: the number of parts of the vector, each with its own lane.
    """

    algorithm: str
    size: int
    rank: int
    root: int
    lanes: int


def checked(algorithm: str, size: int, rank: int, root: int, lanes: int) -> GridArguments:
    """Return the arguments of a builder, checked; raises as `check_ranks`, or if there are no lanes."""
    check_ranks(size, rank, root)
    check_parts("lanes", lanes)
    return GridArguments(algorithm, size, rank, root, lanes)


def checked_dims(size: int, dims: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths of a grid.

    Raises:
        UsageError: they are not positive numbers, or their product is not the number of ranks.
    """
    if not isinstance(dims, (tuple, list)) or not all(type(length) is int and length > 0 for length in dims):
        raise UsageError(f"dims is {dims!r}, but must be a tuple of lengths such as (4, 8)")
    if prod(dims) != size:
        raise UsageError(f"dims {tuple(dims)} make a grid of {prod(dims)} places, but there are {size} ranks")
    return tuple(dims)


def course_of(lane: int, order: Sequence[int]) -> Course:
    """Return the course of a lane: each lane starts with another of the dimensions in `order`, first forwards."""
    turns, first = divmod(lane, len(order))
    return Course((*order[first:], *order[:first]), -1 if turns % 2 else 1)


def allreduce_plan(caller: GridArguments, lane_of: Callable[[int, int], Lane], blocks: int) -> Plan:
    """Return an allreduce; `lane_of(lane, first)` is the lane of the part that starts with block `first`.

    A part has `blocks` blocks.
    """
    algorithm, size, rank, root, lanes = caller
    vector = even(blocks * lanes)
    return Plan(
        collective="allreduce",
        algorithm=algorithm,
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=vector,
        lanes=tuple(lane_of(lane, lane * blocks) for lane in range(lanes))
        if size > 1
        else (single_rank_lane(vector.blocks),),
    )


def reduce_scatter_plan(
    caller: GridArguments, lane_of: Callable[[int, int], Lane], permutation: tuple[int, ...], *, varying: bool
) -> Plan:
    """Return a reduce-scatter; `lane_of` as in `allreduce_plan`, with partial results in SCRATCH, which is like INPUT.

    The lane writes its result to the block of OUTPUT with its number.
    """
    algorithm, size, rank, root, lanes = caller
    vector = in_parts(shares(size, varying), lanes)
    return Plan(
        collective="reduce_scatter",
        algorithm=algorithm,
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=in_parts(even(1), lanes),
        scratch=scratch_like(Buffer.INPUT, vector) if size > 2 else Partition(0),
        lanes=tuple(lane_of(lane, lane * size) for lane in range(lanes)) if size > 1 else (single_rank_lane(lanes),),
        permutation=permutation,
    )


def allgather_plan(
    caller: GridArguments,
    lane_of: Callable[[int, int], Lane],
    position: Callable[[int], int],
    permutation: tuple[int, ...],
    *,
    varying: bool,
) -> Plan:
    """Return an allgather; `lane_of` as in `allreduce_plan`. The rank has the position `position(lane)` on a lane.

    The first group of each lane sends INPUT, and copies it to the rank's block of OUTPUT.
    """
    algorithm, size, rank, root, lanes = caller

    def with_own_part(lane: int) -> Lane:
        own = Copy(output_block(lane * size + position(lane)), input_block(lane))
        first, *others = lane_of(lane, lane * size) or (Group(()),)
        assert isinstance(first, Group)
        steps = (Send(step.peer, own.src) if isinstance(step, Send) else step for step in first.steps)
        return (Group((*steps, own)), *others)

    return Plan(
        collective="allgather",
        algorithm=algorithm,
        size=size,
        rank=rank,
        root=root,
        input=in_parts(even(1), lanes),
        output=in_parts(shares(size, varying), lanes),
        lanes=tuple(map(with_own_part, range(lanes))),
        permutation=permutation,
    )


def permutation_of(positions: Sequence[Callable[[int], int]], ranks: range) -> tuple[int, ...]:
    """Return the permutation of a plan: from the position of a block, lane by lane, to its index in memory.

    `positions` has, for each lane, the function from ranks to positions. The permutation is empty if nothing moves.
    """
    lanes = len(positions)
    orders = (sorted(ranks, key=position) for position in positions)
    permutation = tuple(rank * lanes + lane for lane, order in enumerate(orders) for rank in order)
    return () if permutation == tuple(range(len(permutation))) else permutation
