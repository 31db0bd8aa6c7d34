"""The shape of a grid: how its ranks and coordinates belong together, which ranks are neighbours, and balanced dims.

This file only computes with integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from unisono.algorithms.ir.neighbourhood import Neighbourhood
from unisono.collectives.calls.arguments import checked_integer
from unisono.errors import UsageError
from unisono.foundation.records import record

# MPI libraries accept as many dimensions or fewer.
_MOST_DIMENSIONS = 64
_MOST_RANKS = 1 << 31


@record
class GridShape:
    """A Cartesian grid of ranks in row-major order: the last coordinate changes fastest.

    Attributes:
        dims: the number of ranks along each dimension.
        periodic: for each dimension, whether the last rank and the first one are neighbours.
    """

    dims: tuple[int, ...]
    periodic: tuple[bool, ...]

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank."""
        coordinates: list[int] = []
        for length in reversed(self.dims):
            rank, coordinate = divmod(rank, length)
            coordinates.append(coordinate)
        return tuple(reversed(coordinates))

    def rank_at(self, coordinates: Sequence[int]) -> int | None:
        """Return the rank at these coordinates, modulo the length of periodic dimensions; None outside of the grid."""
        rank = 0
        for coordinate, length, wraps in zip(coordinates, self.dims, self.periodic, strict=True):
            if not (wraps or 0 <= coordinate < length):
                return None
            rank = rank * length + coordinate % length
        return rank

    def neighbour(self, rank: int, offset: Sequence[int]) -> int | None:
        """Return the rank whose coordinates are those of `rank` plus `offset`; None outside of the grid."""
        return self.rank_at([at + by for at, by in zip(self.coordinates(rank), offset, strict=True)])

    def neighbourhood(self, rank: int) -> Neighbourhood:
        """Return the neighbours of a rank: in each dimension first the one below it and then the one above it.

        A block that is sent downwards arrives as the block from above, and vice versa, also where both neighbours are
        the same rank, or this rank itself (MPI-4.1, section 8.6).
        """
        neighbours = tuple(self.neighbour(rank, offset) for offset in self.faces())
        swapped = tuple(index ^ 1 for index in range(len(neighbours)))
        return Neighbourhood(neighbours, neighbours, swapped)

    def along(self, dimensions: Sequence[int]) -> GridShape:
        """Return the shape of the grid that has only these dimensions."""
        kept = [(self.dims[each], self.periodic[each]) for each in dimensions]
        return GridShape(tuple(length for length, _ in kept), tuple(wraps for _, wraps in kept))

    def faces(self) -> Iterator[tuple[int, ...]]:
        """Yield the offsets of the neighbours of a neighbourhood, in order."""
        for dimension in range(len(self.dims)):
            for by in (-1, 1):
                yield tuple(by if each == dimension else 0 for each in range(len(self.dims)))


def checked_shape(size: int, dims: int | Sequence[int | None], periodic: bool | Sequence[bool]) -> GridShape:
    """Return the shape of a grid of `size` ranks; see `Communicator.grid`.

    Raises:
        UsageError: `dims` or `periodic` is wrong, or no grid of these dims has `size` ranks.
    """
    lengths = grid_dims(size, dims)
    periodic = _as_list(periodic)
    if isinstance(periodic, bool):
        return GridShape(lengths, (periodic,) * len(lengths))
    try:
        wraps = tuple(periodic)
    except TypeError:
        wraps = ()
    if len(wraps) != len(lengths) or not all(isinstance(each, bool) for each in wraps):
        raise UsageError(
            f"periodic must be True, False, or one of them for each of {len(lengths)} dimensions, not {periodic!r}"
        )
    return GridShape(lengths, wraps)


def grid_dims(size: int, dims: int | Sequence[int | None]) -> tuple[int, ...]:
    """Return the number of ranks along each dimension of a grid of `size` ranks, as nearly equal as possible.

    Args:
        size: the number of ranks.
        dims: the number of dimensions; or the length of each, where None or 0 stands for a length to choose. Chosen
            lengths descend, as those of MPI_Dims_create.

    Raises:
        UsageError: an argument is wrong, or `size` is no multiple of the product of the fixed lengths.

    >>> import unisono as un
    >>> un.grid_dims(12, 2), un.grid_dims(12, 3), un.grid_dims(12, [0, 2, None])
    ((4, 3), (3, 2, 2), (3, 2, 2))
    """
    size = checked_integer(size, "the number of ranks", 1, _MOST_RANKS)
    dims = _as_list(dims)
    if hasattr(dims, "__index__"):
        lengths = [0] * checked_integer(dims, "the number of dimensions", 0, _MOST_DIMENSIONS)  # type: ignore[arg-type]
    else:
        lengths = _checked_lengths(dims)
    fixed, free = prod(filter(None, lengths)), lengths.count(0)
    if size % fixed or (free == 0 and size != fixed):
        shown = [length or None for length in lengths]
        raise UsageError(
            f"dims {shown} do not fit {size} ranks: the product of the dims must {'divide' if free else 'be'} {size}; "
            f"for fewer ranks, make the grid of a subgroup"
        )
    chosen = iter(_balanced(size // fixed, free))
    return tuple(length or next(chosen) for length in lengths)


def _as_list(value: Any) -> Any:
    """Return the list of the elements of an array of numpy, the value of a scalar of numpy, and all else as it is."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _checked_lengths(dims: Sequence[int | None]) -> list[int]:
    try:
        lengths = [0 if length is None else length for length in dims]
    except TypeError:
        raise UsageError(f"dims must be a number of dimensions or the length of each, not {dims!r}") from None
    if len(lengths) > _MOST_DIMENSIONS:
        raise UsageError(f"dims has {len(lengths)} dimensions, and the most are {_MOST_DIMENSIONS}")
    return [checked_integer(length, f"dims[{index}]", 0, _MOST_RANKS) for index, length in enumerate(lengths)]


def _balanced(size: int, parts: int) -> tuple[int, ...]:
    """Return `parts` descending factors of `size` whose first and last differ least."""
    candidates = factorings(size, parts)
    return (
        min((tuple(sorted(each, reverse=True)) for each in candidates), key=lambda each: (each[0] - each[-1], each))
        if parts
        else ()
    )


def factorings(size: int, parts: int, most: int | None = None) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write `size` as a product of `parts` factors that do not ascend, none of them above `most`."""
    if parts == 0:
        if size == 1:
            yield ()
        return
    if parts == 1:
        if most is None or size <= most:
            yield (size,)
        return
    for factor in _divisors(size):
        if (most is None or factor <= most) and factor**parts >= size:
            for rest in factorings(size // factor, parts - 1, factor):
                yield (factor, *rest)


def _divisors(number: int) -> Iterator[int]:
    small = [factor for factor in range(1, int(number**0.5) + 1) if number % factor == 0]
    yield from small
    yield from (number // factor for factor in reversed(small) if factor * factor != number)
