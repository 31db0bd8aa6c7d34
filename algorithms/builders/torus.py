"""Rings in each dimension of a torus, one dimension after the other: the bucket algorithm.

In the reduce-scatter, the ranks along the first dimension pass partial results around their ring, and each rank keeps
the blocks of the ranks that have its coordinate in that dimension. The ranks along the next dimension go on with these
blocks, and so on. The allgather is the same backwards. A torus of 8 by 8 places takes 14 rounds in each phase, where
one ring takes 63, and all messages still go to neighbours.

A part of the vector occupies one direction of one dimension at a time. With several lanes, each part starts with
another dimension, and the second half of 2n lanes takes the opposite directions. So n dimensions need 2n lanes to use
all links. The dimensions may have any length, but only equally long ones take turns without waiting for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from math import prod
from typing import NamedTuple

from unisono.algorithms.builders.arguments import square_dims
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
from unisono.algorithms.ir.plan import (
    Buffer,
    Group,
    Lane,
    Plan,
    Recv,
    RecvReduce,
    Send,
    Span,
    output_block,
)


def allreduce_torus(size: int, rank: int, root: int = 0, dims: tuple[int, ...] = (), lanes: int = 1) -> Plan:
    """Return the plan of an allreduce by rings in each dimension of a torus.

    `dims` are the lengths of the torus, lowest digit of the ranks first; without them, it is a grid of two dimensions
    that is as square as possible, which is one ring if the number of ranks is a prime. INPUT and OUTPUT are `lanes`
    parts of `size` blocks, and may be the same memory. There is no SCRATCH. Each block is combined by one chain of
    ranks, so all ranks get the same bits.

    Raises:
        UsageError: `dims` does not fit the ranks.
    """
    caller = checked("torus", size, rank, root, lanes)
    grid = _grid(size, dims)

    def lane_of(lane: int, first: int) -> Lane:
        rings = list(_rings(grid, _course(grid, lane), rank, first))
        return (*_reduce_scatter(rings, Buffer.OUTPUT), *_allgather(rings))

    return allreduce_plan(caller, lane_of, size)


def reduce_scatter_torus(
    size: int, rank: int, root: int = 0, varying: bool = False, dims: tuple[int, ...] = (), lanes: int = 1
) -> Plan:
    """Return the plan of a reduce-scatter by rings in each dimension of a torus.

    INPUT is `size` shares of `lanes` blocks: equal shares or, if `varying`, by the counts of the ranks. OUTPUT is one
    share, and may be the memory of share `rank` of INPUT. SCRATCH is like INPUT. `dims` and errors are as in
    `allreduce_torus`.
    """
    caller = checked("torus", size, rank, root, lanes)
    grid = _grid(size, dims)

    def lane_of(lane: int, first: int) -> Lane:
        rings = list(_rings(grid, _course(grid, lane), rank, first))
        return _reduce_scatter(rings, Buffer.SCRATCH, output_block(lane))

    return reduce_scatter_plan(caller, lane_of, _permutation(grid, lanes), varying=varying)


def allgather_torus(
    size: int, rank: int, root: int = 0, varying: bool = False, dims: tuple[int, ...] = (), lanes: int = 1
) -> Plan:
    """Return the plan of an allgather by rings in each dimension of a torus.

    INPUT is one share of `lanes` blocks, and may be the memory of share `rank` of OUTPUT. OUTPUT is `size` shares:
    equal ones or, if `varying`, by the counts of the ranks. `dims` and errors are as in `allreduce_torus`.
    """
    caller = checked("torus", size, rank, root, lanes)
    grid = _grid(size, dims)

    def lane_of(lane: int, first: int) -> Lane:
        return _allgather(list(_rings(grid, _course(grid, lane), rank, first)))

    def position(lane: int) -> int:
        return _position(grid, _course(grid, lane), rank)

    return allgather_plan(caller, lane_of, position, _permutation(grid, lanes), varying=varying)


def _grid(size: int, dims: Sequence[int]) -> tuple[int, ...]:
    if dims:
        return checked_dims(size, dims)
    short, long = square_dims(size)
    return (short, long) if short > 1 else (size,)


def _course(grid: tuple[int, ...], lane: int) -> Course:
    """Return the course of a lane. The first lane starts with the outermost dimension, where blocks lie in order."""
    return course_of(lane, range(len(grid) - 1, -1, -1))


class _Ring(NamedTuple):
    """The ring of a rank along one dimension.

    The blocks that the ranks of the ring exchange are `length` runs of `width` blocks. Run j starts with block
    first + j·width, and is of the rank with coordinate j. `place` is the coordinate of the rank itself.
    """

    length: int
    place: int
    first: int
    width: int
    after: int
    before: int
    direction: int

    def run(self, buffer: Buffer, steps: int) -> Span:
        """Return the run of the rank that comes `steps` places after this one, in the direction of the ring."""
        place = (self.place + steps * self.direction) % self.length
        return Span(buffer, self.first + place * self.width, self.width)


def _rings(grid: Sequence[int], course: Course, rank: int, first: int) -> Iterator[_Ring]:
    """Yield the rings of a rank in the order of a reduce-scatter, on the blocks of a part that begins with `first`."""
    width = prod(grid)
    for dimension in course.dimensions:
        length, stride = grid[dimension], prod(grid[:dimension])
        place = rank // stride % length
        width //= length
        after, before = (
            rank + ((place + step) % length - place) * stride for step in (course.direction, -course.direction)
        )
        if length > 1:
            yield _Ring(length, place, first, width, after, before, course.direction)
        first += place * width


def _reduce_scatter(rings: Sequence[_Ring], partial: Buffer, result: Span | None = None) -> Lane:
    """Return the rounds of a reduce-scatter. The last one lowers the result, into `result` or its block of `partial`.

    In step i on a ring, a rank sends the partial result of the run that belongs i + 1 places before it.
    """
    lane: Lane = ()
    own = Buffer.INPUT
    for ring in rings:
        leaving = own
        for step in range(ring.length - 1):
            is_last = ring is rings[-1] and step == ring.length - 2
            arriving, contribution = ring.run(partial, -step - 2), ring.run(own, -step - 2)
            into = result if is_last and result is not None else arriving
            combine = RecvReduce(ring.before, into, contribution, received_first=True, lower=is_last)
            lane = (*lane, Group((Send(ring.after, ring.run(leaving, -step - 1)), combine)))
            leaving = partial
        own = partial
    return lane


def _allgather(rings: Sequence[_Ring]) -> Lane:
    """Return the rounds of an allgather. In step i on a ring, a rank sends the run that belongs i places before it."""
    return tuple(
        Group(
            (
                Send(ring.after, ring.run(Buffer.OUTPUT, -step)),
                Recv(ring.before, ring.run(Buffer.OUTPUT, -step - 1)),
            )
        )
        for ring in reversed(rings)
        for step in range(ring.length - 1)
    )


def _position(grid: Sequence[int], course: Course, rank: int) -> int:
    position = 0
    for dimension in course.dimensions:
        position = position * grid[dimension] + rank // prod(grid[:dimension]) % grid[dimension]
    return position


@lru_cache(maxsize=16)
def _permutation(grid: tuple[int, ...], lanes: int) -> tuple[int, ...]:
    ranks = range(prod(grid))
    return permutation_of([partial(_position, grid, _course(grid, lane)) for lane in range(lanes)], ranks)
