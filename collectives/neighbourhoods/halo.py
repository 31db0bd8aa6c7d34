"""Halos: each rank of a grid keeps a part of a field, with copies of the nearest elements of its neighbours around it.

Used by: `Grid.halo`.

Theory of operation
-------------------
The rank at (1, 0) of a grid of 2 × 2 has an array of 6 × 6 with a halo of width 1. Its own elements are
``array[1:5, 1:5]``. An exchange copies the lowest row of them, ``array[1:2, 1:5]``, to the ghost layer
``array[5:6, 1:5]`` of the rank at (0, 0), and so on for each neighbour. In detail:

1. Each *offset* to a neighbour, such as (-1, 0), has a region that is sent and a ghost region that is received. With
   `corners`, there is an offset for each combination of -1, 0 and 1.
2. The native core copies all regions that are sent to one flat stage. The regions for one rank lie together there, so
   that each neighbour gets one message, although it may be the neighbour in several directions. If it is the rank
   itself, the region is copied to the ghost region at once.
3. A persistent call exchanges the stages. It is a neighbor_alltoallv whose counts are the elements for each rank.
4. The core copies the received stage to the ghost regions.

A region that the sender takes at the offset o is received at the offset -o. Both ends sort the regions between them by
the offset of the sender.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, product
from typing import Any, Generic, TypeVar

import numpy as np

from unisono.algorithms.builders.neighbours import NAME, neighbor_alltoall_direct
from unisono.algorithms.ir.binding import Shape
from unisono.algorithms.ir.neighbourhood import Neighbourhood
from unisono.algorithms.ir.plan import Counts
from unisono.collectives.arrays import adapters
from unisono.collectives.arrays.mapped import empty
from unisono.collectives.arrays.operands import dtype_of
from unisono.collectives.calls.arguments import checked_integer
from unisono.collectives.calls.work import Work
from unisono.collectives.neighbourhoods.grid_shape import GridShape
from unisono.errors import UsageError
from unisono.foundation.uncopyable import uncopyable
from unisono.transports import _core
from unisono.transports.contracts.call import AnyArray, Call, Extent, Signature, moved

Array = TypeVar("Array")
Offset = tuple[int, ...]
_MOST_WIDTH = 1 << 40
# A stage of this size is memory that other ranks of the host read in place.
_LEAST_MAPPED_NBYTES = 64 << 10


@uncopyable("it sends the elements of one array; make another one by grid.halo")
class Halo(Generic[Array]):
    """The halo of an array, whose exchange is a persistent call of all ranks of a grid. `Grid.halo` makes it.

    `exchange` returns when the ghost layers hold the elements of the neighbours. `start` and `wait` do the same in two
    steps, between which the program computes all that does not depend on the ghost layers. An exchange is a call of all
    ranks of the grid, in the same order as their other calls. One thread at a time may use a halo.

    Attributes:
        array: the array.
        width: the width of the halo along each dimension of the grid.
    """

    def __init__(
        self,
        array: Array,
        width: tuple[int, ...],
        stages: _Stages,
        again: Callable[..., Any],
    ) -> None:
        self.array = array
        self.width = width
        self._stages = stages
        self._again = again
        self._work: Work[Any] | None = None

    def exchange(self) -> Array:
        """Exchange the halo, and return the array.

        Raises:
            UsageError: an exchange has been started and not waited for, or the grid is closed.
            MismatchError: a neighbour has another number of elements on this edge.
            PeerLostError, CollectiveTimeoutError, AbortedError: the call failed.
        """
        self._check_ended()
        self._stages.pack()
        self._again()
        self._stages.unpack()
        return self.array

    def start(self) -> None:
        """Start an exchange: send the elements as they are now. Do not use the ghost layers before `wait` has returned.

        Raises:
            UsageError: an exchange has been started and not waited for, or the grid is closed.
        """
        self._check_ended()
        self._stages.pack()
        self._work = self._again(wait=False)

    def wait(self) -> Array:
        """Wait for the exchange that `start` has started, and return the array; raises the errors of `exchange`."""
        if self._work is None:
            raise UsageError("no exchange has been started: call start() first, or exchange()")
        work, self._work = self._work, None
        work.wait()
        self._stages.unpack()
        return self.array

    def _check_ended(self) -> None:
        if self._work is not None:
            raise UsageError("an exchange of this halo has been started: wait() for it first")


class _Stages:
    """The flat memory that an exchange sends and receives, and the copies between it and the array.

    Args:
        dtype: the dtype of the array.
        sent, received: the regions of the array that are sent to other ranks and received from them.
        own: the pairs of a region and the ghost region of the same rank that gets its elements.

    Attributes:
        source, target: the memory that is sent and received.
        pack: copies the regions that are sent to `source`, and those of `own`.
        unpack: copies `target` to the ghost regions.
    """

    def __init__(
        self,
        dtype: np.dtype[Any],
        sent: Sequence[AnyArray],
        received: Sequence[AnyArray],
        own: Sequence[tuple[AnyArray, AnyArray]],
    ) -> None:
        source, target = (_stage(dtype, regions) for regions in (sent, received))
        self.source, self.target = (moved(stage, dtype_of(stage, "array")) for stage in (source, target))
        packed = list(zip(_parts(source, sent), sent, strict=True))
        self.pack = _copies(dtype, [*packed, *((ghost, region) for region, ghost in own)])
        self.unpack = _copies(dtype, list(zip(received, _parts(target, received), strict=True)))
        self._owners = (sent, received, own)  # whose memory the copies use


class HaloPlan:
    """The stages and the call of a halo.

    Args:
        shape: the shape of the grid.
        rank, size: this rank, and the number of ranks.
        array: the array, as the user passed it.
        width: the width along each dimension, or one width for all.
        corners: whether the halo has edges and corners, too.

    Raises:
        UsageError: the array cannot be written, is too small or has too few axes, or `width` is wrong.
        TransportUnavailableError: the array is in the memory of a device.
    """

    def __init__(self, shape: GridShape, rank: int, size: int, array: Any, width: Any, *, corners: bool) -> None:
        view = adapters.view_to_write(array, "array")
        dtype = dtype_of(view, "array")
        self.width = _checked_width(width, len(shape.dims))
        _check_array(view, self.width)
        offsets = _offsets(shape, self.width, corners=corners)
        neighbours = {offset: shape.neighbour(rank, offset) for offset in offsets}
        sent, received = defaultdict[int, list[AnyArray]](list), defaultdict[int, list[AnyArray]](list)
        for offset in offsets:  # the offset of the sender
            source = neighbours[_opposite(offset)]
            if (target := neighbours[offset]) is not None:
                sent[target].append(view[self._region(offset, is_ghost=False)])
            if source is not None:
                received[source].append(view[self._region(_opposite(offset), is_ghost=True)])
        own = list(zip(sent.pop(rank, ()), received.pop(rank, ()), strict=True))
        peers = tuple(sorted(sent))
        outgoing, incoming = ([each for peer in peers for each in by[peer]] for by in (sent, received))
        self.stages = _Stages(view.dtype, outgoing, incoming, own)
        counts = [[sum(each.size for each in by[peer]) for peer in peers] for by in (sent, received)]
        self.call = _call(dtype, size, rank, Neighbourhood(peers, peers), counts, self.width)

    def _region(self, offset: Offset, *, is_ghost: bool) -> tuple[slice, ...]:
        """Return the region of own elements at an offset, or of ghosts."""
        near = [(0, width) if is_ghost else (width, 2 * width) for width in self.width]
        by_side = {
            -1: [slice(first, last) for first, last in near],
            0: [slice(width, -width or None) for width in self.width],
            1: [slice(-last, -first or None) for first, last in near],
        }
        return tuple(by_side[side][dimension] for dimension, side in enumerate(offset))


def _offsets(shape: GridShape, width: Sequence[int], *, corners: bool) -> list[Offset]:
    """Return the offsets of all neighbours, in an order that is the same on all ranks."""
    offsets = product((-1, 0, 1), repeat=len(shape.dims)) if corners else shape.faces()
    return [
        offset
        for offset in offsets
        if any(offset) and all(each or not side for each, side in zip(width, offset, strict=True))
    ]


def _opposite(offset: Offset) -> Offset:
    return tuple(-side for side in offset)


def _checked_width(width: Any, dimensions: int) -> tuple[int, ...]:
    if hasattr(width, "__index__"):
        return (checked_integer(width, "width", 0, _MOST_WIDTH),) * dimensions
    try:
        widths = tuple(checked_integer(each, f"width[{index}]", 0, _MOST_WIDTH) for index, each in enumerate(width))
    except TypeError:
        widths = ()
    if len(widths) != dimensions:
        raise UsageError(f"width must be an integer, or one for each of {dimensions} dimensions, not {width!r}")
    return widths


def _check_array(array: AnyArray, width: Sequence[int]) -> None:
    if not array.flags.writeable:
        raise UsageError("array is read-only: pass an array that can be written")
    if array.ndim < len(width):
        raise UsageError(
            f"array has {array.ndim} axes, and the grid has {len(width)} dimensions: it needs as many axes"
        )
    for axis, each in enumerate(width):
        if array.shape[axis] < 3 * each:
            raise UsageError(
                f"array has {array.shape[axis]} elements along axis {axis}, but needs at least {3 * each}: a halo of "
                f"width {each} on both sides, and as many elements of its own"
            )


def _call(
    dtype: Any, size: int, rank: int, neighbourhood: Neighbourhood, counts: list[list[int]], width: tuple[int, ...]
) -> Call:
    plan = neighbor_alltoall_direct(size, rank, neighbourhood, varying=True)
    elements = sum(counts[0]), sum(counts[1])
    signature = Signature("halo", dtype.name, width, "C", None, None, NAME, 1)
    extent = Extent.of(elements, dtype, None)
    sent, received = ([count * dtype.units for count in each] for each in counts)
    return Call(signature, plan, Shape(extent.elements, {Counts.SEND: sent, Counts.RECEIVE: received}), (extent,))


def _stage(dtype: np.dtype[Any], regions: Sequence[AnyArray]) -> AnyArray:
    elements = sum(region.size for region in regions)
    make = empty if elements * dtype.itemsize >= _LEAST_MAPPED_NBYTES else np.empty
    stage: AnyArray = make(elements, dtype)
    return stage


def _parts(stage: AnyArray, regions: Sequence[AnyArray]) -> list[AnyArray]:
    """Return the parts of a stage, one after the other, in the shapes of the regions."""
    ends = list(accumulate((region.size for region in regions), initial=0))
    return [
        stage[first:last].reshape(region.shape) for (first, last), region in zip(pairwise(ends), regions, strict=True)
    ]


def _copies(dtype: np.dtype[Any], pairs: Sequence[tuple[AnyArray, AnyArray]]) -> _core.StridedCopies:
    """Return the copies of pairs of arrays: to the first, from the second."""
    return _core.StridedCopies(
        dtype.itemsize,
        [(dst.ctypes.data, src.ctypes.data, dst.shape, dst.strides, src.strides) for dst, src in pairs],
    )
