"""The methods of a grid that find ranks by their coordinates, and exchange halos.

Used by: `Grid`, which inherits from `GridPlaces`. Only `halo` makes calls.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from unisono.collectives.api.neighbours import Neighbours
from unisono.collectives.calls.arguments import checked_integer
from unisono.errors import UsageError
from unisono.transports.contracts.wildcards import NOBODY, Nobody

if TYPE_CHECKING:
    from unisono.collectives.neighbourhoods.grid_shape import GridShape

_MOST = 1 << 31


class GridPlaces(Neighbours):
    """The places of ranks in a Cartesian grid, in row-major order: the last coordinate changes fastest.

    Attributes:
        dims: the number of ranks along each dimension.
        periodic: for each dimension, whether its last rank and its first one are neighbours.
    """

    dims: tuple[int, ...]
    periodic: tuple[bool, ...]

    def _take_shape(self, shape: GridShape) -> None:
        self._shape = shape
        self.dims, self.periodic = shape.dims, shape.periodic
        self._meet(shape.neighbourhood(self.rank))

    def coordinates(self, rank: int | None = None) -> tuple[int, ...]:
        """Return the coordinates of a rank, by default of this one.

        Raises:
            UsageError: there is no such rank.
        """
        return self._shape.coordinates(self.rank if rank is None else self._rank_of(rank, "rank"))

    def rank_at(self, coordinates: Sequence[int]) -> int | Nobody:
        """Return the rank at these coordinates; `NOBODY` outside of the grid. Periodic dimensions have no outside.

        Raises:
            UsageError: `coordinates` is not an integer for each dimension.
        """
        try:
            at = [operator.index(coordinate) for coordinate in coordinates]
        except TypeError:
            at = []
        if len(at) != len(self.dims):
            raise UsageError(
                f"coordinates must be {len(self.dims)} integers, one for each dimension, not {coordinates!r}"
            )
        rank = self._shape.rank_at(at)
        return NOBODY if rank is None else rank

    def shift(self, dimension: int, by: int = 1) -> tuple[int | Nobody, int | Nobody]:
        """Return the source and the destination of a shift of all arrays by `by` ranks along a dimension.

        The destination is `by` ranks above this one, and the source `by` ranks below. Each is `NOBODY` outside of the
        grid, as MPI_PROC_NULL of MPI_Cart_shift.

        Raises:
            UsageError: there is no such dimension, or `by` is no integer.

        >>> import numpy as np, unisono as un
        >>> def neighbours(world):
        ...     line = world.grid([3])
        ...     return line.shift(0)
        >>> un.launch(neighbours, 3)[0]
        (<Nobody.NOBODY: -1>, 1)
        """
        dimension = checked_integer(dimension, "dimension", 0, len(self.dims) - 1)
        by = checked_integer(by, "by", -_MOST, _MOST)
        offset = [by if each == dimension else 0 for each in range(len(self.dims))]
        source = self._shape.neighbour(self.rank, [-each for each in offset])
        destination = self._shape.neighbour(self.rank, offset)
        return NOBODY if source is None else source, NOBODY if destination is None else destination

    def _ranks_along(self, kept: Sequence[int]) -> list[int]:
        """Return the ranks that differ from this one at most in the coordinates of the dimensions `kept`, in order."""
        own = self._shape.coordinates(self.rank)
        ranges = [range(length) if each in kept else (own[each],) for each, length in enumerate(self.dims)]
        ranks = [self._shape.rank_at(coordinates) for coordinates in product(*ranges)]
        return [rank for rank in ranks if rank is not None]

    def _kept(self, keep: Sequence[int]) -> list[int]:
        try:
            kept = [checked_integer(each, f"keep[{index}]", 0, len(self.dims) - 1) for index, each in enumerate(keep)]
        except TypeError:
            raise UsageError(f"keep must be a sequence of dimensions, not {keep!r}") from None
        if sorted(set(kept)) != kept:
            raise UsageError(f"keep must be different dimensions in ascending order, not {kept}")
        return kept
