"""The methods of a grid that find ranks by their coordinates, and exchange halos.

Used by: `Grid`, which inherits from `GridPlaces`. Only `halo` makes calls.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from unisono.collectives.api.neighbours import Neighbours
from unisono.collectives.calls.arguments import checked_integer
from unisono.errors import UsageError
from unisono.transports.contracts.wildcards import NOBODY, Nobody

if TYPE_CHECKING:
    from unisono.collectives.arrays.typing import Target
    from unisono.collectives.neighbourhoods.grid_shape import GridShape
    from unisono.collectives.neighbourhoods.halo import Halo

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

    def halo(
        self,
        array: Target,
        width: int | Sequence[int] = 1,
        *,
        corners: bool = False,
        timeout_s: float | None = None,
    ) -> Halo[Target]:
        """Return the halo of an array: a persistent exchange of the elements next to the neighbours. Nothing is sent.

        Dimension d of the grid is axis d of the array; further axes belong to each element. Each rank passes the array
        of its part of a field, with `width` ghost layers on both sides of each dimension. An exchange copies the own
        elements next to a neighbour to the ghost layers of that neighbour. Ghost layers at the border of the grid stay
        as they are.

        Args:
            array: a writable array on the host, of numpy, torch or another library whose arrays can be written, with
                any strides. Along each of these axes it has at least three times the width.
            width: the number of ghost layers: for all dimensions, or for each.
            corners: whether ghost elements that lie outside along several dimensions are exchanged, too. Each rank then
                has up to 26 neighbours in 3 dimensions, and all are reached at once.
            timeout_s: seconds until an exchange fails; by default the option `timeout_s`.

        Raises:
            UsageError: an argument is wrong, or the grid is closed.
            TransportUnavailableError: the array is in the memory of a device.

        >>> import numpy as np, unisono as un
        >>> def filled(world):
        ...     line = world.grid([2])
        ...     field = np.full(4, -1)
        ...     field[1:-1] = 10 * line.rank, 10 * line.rank + 1
        ...     return line.halo(field).exchange().tolist()
        >>> un.launch(filled, 2)
        [[-1, 0, 1, 10], [1, 10, 11, -1]]
        """
        from unisono.collectives.neighbourhoods.halo import Halo, HaloPlan

        self._check_usable()
        limit_s = self._limit_s(timeout_s)
        plan = HaloPlan(self._shape, self.rank, self.size, array, width, corners=corners)
        on_start = partial(self._works.add, limit_s=limit_s)
        stages = plan.stages
        again = self._executor.persistent(plan.call, stages.source, stages.target, limit_s, None, on_start)
        return Halo(array, plan.width, stages, again)

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
