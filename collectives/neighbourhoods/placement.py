"""Placement: which rank of a communicator gets which place of a grid, so that neighbours share hosts.

The grid is cut into equal boxes with as many places as each host has ranks. The boxes are those with the fewest edges
between hosts. For example, a grid of 4 × 4 over 4 hosts of 4 ranks is cut into boxes of 2 × 2, where 16 of its 24 edges
stay inside hosts, or of a torus 16 of 32. Rows of 4 would keep 12.

This file only computes with integers, so all ranks get the same result without a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import prod

from unisono.collectives.neighbourhoods.grid_shape import GridShape


def rank_at_each_place(shape: GridShape, hosts: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return the rank of the communicator at each place of a grid, in row-major order.

    The ranks of each host get consecutive places instead of a box if hosts have different numbers of ranks, if no boxes
    fit, or if this cuts fewer edges. On a single host, the ranks keep their order.
    """
    in_rows = list(chain.from_iterable(hosts))
    if len(hosts) == 1:
        return sorted(in_rows)
    box = _box(shape, len(hosts[0])) if len({len(host) for host in hosts}) == 1 else None
    if box is None:
        return in_rows
    in_boxes = _in_boxes(shape, box, hosts)
    host_of = {rank: number for number, host in enumerate(hosts) for rank in host}
    return min(in_rows, in_boxes, key=lambda ranks: _edges_between(shape, [host_of[rank] for rank in ranks]))


def _in_boxes(shape: GridShape, box: tuple[int, ...], hosts: Sequence[Sequence[int]]) -> list[int]:
    boxes = _shape_of([length // inside for length, inside in zip(shape.dims, box, strict=True)])
    within = _shape_of(box)
    ranks = []
    for place in range(prod(shape.dims)):
        parts = [divmod(at, inside) for at, inside in zip(shape.coordinates(place), box, strict=True)]
        host, index = (grid.rank_at(each) for grid, each in zip((boxes, within), zip(*parts, strict=True), strict=True))
        assert host is not None, "a box lies inside of the grid"
        assert index is not None, "a place lies inside of its box"
        ranks.append(hosts[host][index])
    return ranks


def _edges_between(shape: GridShape, host_at: Sequence[int]) -> int:
    """Return the number of edges, of both directions, between places of different hosts."""
    places = range(prod(shape.dims))
    neighbours = [(place, other) for place in places for other in shape.neighbourhood(place).destinations]
    return sum(other is not None and host_at[place] != host_at[other] for place, other in neighbours)


def _shape_of(dims: Sequence[int]) -> GridShape:
    return GridShape(tuple(dims), (False,) * len(dims))


def _box(shape: GridShape, places: int) -> tuple[int, ...] | None:
    """Return the box of this many places with the fewest edges that leave it; None if none divides the grid."""

    def edges_cut(box: tuple[int, ...]) -> int:
        sides = zip(box, shape.dims, shape.periodic, strict=True)
        cuts = [(length // inside - 1 + wraps, length) for inside, length, wraps in sides if inside < length]
        return sum(number * (prod(shape.dims) // length) for number, length in cuts)

    return min(_boxes(shape.dims, places), key=lambda box: (edges_cut(box), box), default=None)


def _boxes(dims: Sequence[int], places: int) -> Iterator[tuple[int, ...]]:
    if not dims:
        if places == 1:
            yield ()
        return
    for length in range(1, min(dims[0], places) + 1):
        if dims[0] % length == 0 and places % length == 0:
            for rest in _boxes(dims[1:], places // length):
                yield (length, *rest)
