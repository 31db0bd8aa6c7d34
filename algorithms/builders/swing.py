"""Swing: recursive doubling on rings and tori, in which ranks swing between both sides, so that messages travel less.

On a ring, recursive doubling exchanges over the distances 1, 2, 4, 8, … Swing exchanges over 1, -1, 3, -5, 11, …: the
distance of step s is ρ(s) = (1 - (-2)^(s+1)) / 3 for ranks of even number, and -ρ(s) for ranks of odd number. It is
about a third shorter, and both directions of the ring carry messages in turn. On a torus, each step takes the next
dimension, and a rank has its coordinate in that dimension as its number.

*Why it works.* In one dimension of p = 2^L places, let e(r) = r for an even place r, and r - ρ(L - 1) for an odd one.
Step s joins two places whose e agree modulo 2^(s+1), and differ modulo 2^(s+2); step L - 1 joins an even and an odd
place of equal e. So each step splits the places that a rank reaches by the later steps into two halves, as the bits of
numbers do in recursive halving. The *position* of a rank is the string of these bits, and the halves are consecutive
positions.

The form for long vectors halves the vector with the nearest rank first, and so sends most data over one hop. The form
for short vectors exchanges whole vectors. It starts with the farthest rank, because ranks then combine hierarchically
and get the same bits; the published order, in which the nearest comes first, takes as long.

With several lanes, each part of the vector starts with another dimension, and the second half of 2n lanes takes the
opposite directions. So n dimensions need 2n lanes to use all links. If the number of ranks is not a power of two, an
allreduce on a ring folds ranks (`builders.folding`). The paper treats even numbers without folding, by messages of
irregular sets of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import prod

from unisono.algorithms.builders.arguments import check_supported, needs_power_of_two
from unisono.algorithms.builders.butterfly import PairExchange, allgather_lane, halves, reduce_scatter_lane
from unisono.algorithms.builders.doubling import exchanging_lane
from unisono.algorithms.builders.folding import fold
from unisono.algorithms.builders.grid_lanes import (
    Course,
    allgather_plan,
    allreduce_plan,
    checked,
    checked_dims,
    course_of,
    permutation_of,
    reduce_scatter_plan,
)
from unisono.algorithms.builders.rabenseifner import allreduce_lane, from_block
from unisono.algorithms.ir.plan import Buffer, Lane, Partition, Plan, output_block, scratch_like
from unisono.errors import UsageError


def allreduce_swing(size: int, rank: int, root: int = 0, dims: tuple[int, ...] = (), lanes: int = 1) -> Plan:
    """Return the plan of an allreduce by halving and doubling over the distances of Swing.

    `dims` are the lengths of a torus, which must be powers of two; without them, the ranks are a ring, of any number.
    INPUT and OUTPUT are `lanes` parts of one block for each rank that takes part, and may be the same memory. There is
    no SCRATCH. One rank combines each block, so all ranks get the same bits.

    Raises:
        UsageError: `dims` does not fit the ranks, or a length is not a power of two.
    """
    caller = checked("swing", size, rank, root, lanes)
    folding = fold(size)
    grid = _grid(size, dims) if dims else (folding.positions,)

    def lane_of(lane: int, first: int) -> Lane:
        exchanges = [
            each._replace(partner=folding.leader(each.partner))
            for each in _exchanges(grid, _course(grid, lane), folding.position(rank))
        ]
        return allreduce_lane(folding, rank, exchanges, first)

    return allreduce_plan(caller, lane_of, folding.positions)


def allreduce_swing_doubling(size: int, rank: int, root: int = 0, dims: tuple[int, ...] = (), lanes: int = 1) -> Plan:
    """Return the plan of an allreduce that exchanges whole vectors over the distances of Swing, for short vectors.

    INPUT and OUTPUT are one block for each lane, and may be the same memory. SCRATCH is like OUTPUT. `dims` and errors
    are as in `allreduce_swing`.
    """
    caller = checked("swing_doubling", size, rank, root, lanes)
    folding = fold(size)
    grid = _grid(size, dims) if dims else (folding.positions,)

    def lane_of(lane: int, first: int) -> Lane:
        exchanges = _exchanges(grid, _course(grid, lane), folding.position(rank))
        partners = [folding.leader(each.partner) for each in reversed(exchanges)]
        return exchanging_lane(rank, folding, partners, first)

    plan = allreduce_plan(caller, lane_of, blocks=1)
    leads = folding.leads(rank) and size > 1
    return replace(plan, scratch=scratch_like(Buffer.OUTPUT, plan.output) if leads else Partition(0))


def reduce_scatter_swing(
    size: int, rank: int, root: int = 0, varying: bool = False, dims: tuple[int, ...] = (), lanes: int = 1
) -> Plan:
    """Return the plan of a reduce-scatter by halving over the distances of Swing, for a power of two of ranks.

    INPUT is `size` shares of `lanes` blocks: equal shares or, if `varying`, by the counts of the ranks. OUTPUT is one
    share, and may be the memory of share `rank` of INPUT. SCRATCH is like INPUT. `dims` is as in `allreduce_swing`.

    Raises:
        UsageError: `size` or a length of `dims` is not a power of two, or `dims` does not fit the ranks.
    """
    caller = checked("swing", size, rank, root, lanes)
    grid = _grid(size, dims)

    def lane_of(lane: int, first: int) -> Lane:
        exchanges = _exchanges(grid, _course(grid, lane), rank)
        into = output_block(lane)
        return reduce_scatter_lane(rank, exchanges, from_block(first), Buffer.INPUT, Buffer.SCRATCH, into)

    return reduce_scatter_plan(caller, lane_of, _permutation(grid, lanes), varying=varying)


def allgather_swing(
    size: int, rank: int, root: int = 0, varying: bool = False, dims: tuple[int, ...] = (), lanes: int = 1
) -> Plan:
    """Return the plan of an allgather by doubling over the distances of Swing, for a power of two of ranks.

    INPUT is one share of `lanes` blocks, and may be the memory of share `rank` of OUTPUT. OUTPUT is `size` shares:
    equal ones or, if `varying`, by the counts of the ranks. `dims` and errors are as in `reduce_scatter_swing`.
    """
    caller = checked("swing", size, rank, root, lanes)
    grid = _grid(size, dims)

    def lane_of(lane: int, first: int) -> Lane:
        return allgather_lane(_exchanges(grid, _course(grid, lane), rank), from_block(first))

    def position(lane: int) -> int:
        return _position(grid, _course(grid, lane), rank)

    return allgather_plan(caller, lane_of, position, _permutation(grid, lanes), varying=varying)


def swing_distance(step: int) -> int:
    """Return the distance from a rank of even number to its partner in a step, such as 1, -1, 3, -5 or 11."""
    return (1 - (-1 if step % 2 == 0 else 1) * (2 << step)) // 3


def swing_partner(length: int, place: int, step: int, direction: int = 1) -> int:
    """Return the partner of a place in a step, on a ring of `length` places."""
    distance = direction * swing_distance(step)
    return (place - distance if place % 2 else place + distance) % length


def _grid(size: int, dims: Sequence[int]) -> tuple[int, ...]:
    if not dims:
        check_supported(needs_power_of_two(size))
        return (size,)
    grid = checked_dims(size, dims)
    if any(needs_power_of_two(length) for length in grid):
        raise UsageError(f"dims {grid}: Swing needs lengths that are powers of two")
    return grid


def _course(grid: tuple[int, ...], lane: int) -> Course:
    return course_of(lane, range(len(grid)))


def _stages(grid: Sequence[int], course: Course) -> Iterator[tuple[int, int, int]]:
    """Yield the steps of a part as (length of the dimension, stride of its places, step within it), in turn."""
    rounds = [length.bit_length() - 1 for length in grid]
    for step in range(max(rounds)):
        for dimension in course.dimensions:
            if step < rounds[dimension]:
                yield grid[dimension], prod(grid[:dimension]), step


def _exchanges(grid: Sequence[int], course: Course, rank: int) -> list[PairExchange]:
    """Return the exchanges of a rank, the nearest first. The kept and sent blocks are positions."""
    held, exchanges = range(prod(grid)), list[PairExchange]()
    for length, stride, step in _stages(grid, course):
        place = rank // stride % length
        partner = rank + (swing_partner(length, place, step, course.direction) - place) * stride
        kept, sent = halves(held, keeps_upper=_half(length, place, step, course.direction))
        exchanges.append(PairExchange(partner, kept, sent))
        held = kept
    return exchanges


def _half(length: int, place: int, step: int, direction: int) -> bool:
    """Return the half to which a place belongs in a step; its partner belongs to the other one."""
    last = length.bit_length() - 2
    if step == last:
        return place % 2 == 1
    even = place - direction * swing_distance(last) if place % 2 else place
    return bool(even >> (step + 1) & 1)


def _position(grid: Sequence[int], course: Course, rank: int) -> int:
    position = 0
    for length, stride, step in _stages(grid, course):
        position = 2 * position + _half(length, rank // stride % length, step, course.direction)
    return position


@lru_cache(maxsize=16)
def _permutation(grid: tuple[int, ...], lanes: int) -> tuple[int, ...]:
    ranks = range(prod(grid))
    return permutation_of([partial(_position, grid, _course(grid, lane)) for lane in range(lanes)], ranks)
