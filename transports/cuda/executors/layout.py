"""The memory of the blocks of a call: in the caller's arrays and, if other ranks read them, in the rank's slab.

A slab is memory of a GPU that all ranks of the host can open. It holds an *image* of each block that other ranks read,
for one segment of the call at a time, and all of SCRATCH. Every rank computes the layouts of all ranks from the same
plans and counts, so they exchange none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from unisono.algorithms.ir.binding import Shape, bounds, split
from unisono.algorithms.ir.plan import Buffer, Plan, Span

_ALIGNMENT = 256
# Kernels are quickest if all operands are aligned alike. So an image is aligned as its block is in an aligned array.
_PACK = 16


class BlockPlace(NamedTuple):
    """The part of a block in one segment: `elements` elements, `offset` bytes behind the beginning of its buffer.

    Attributes:
        image: the offset of its image in the slab, in bytes; -1 if it has none.
    """

    buffer: Buffer
    offset: int
    elements: int
    image: int


class Layout:
    """The memory of one rank in a call.

    Args:
        plan: the plan of that rank.
        shape: its element counts.
        itemsize: the size of an element in bytes.
        segments: the number of segments of the call.
        has_image: tells for a block (its buffer, its index in memory) whether it has an image.

    Attributes:
        nbytes: the size of the slab, which suffices for every segment.
    """

    def __init__(
        self, plan: Plan, shape: Shape, itemsize: int, segments: int, has_image: Callable[[Buffer, int], bool]
    ) -> None:
        self._plan = plan
        self._itemsize = itemsize
        self._segments = segments
        self._bounds = {buffer: bounds(plan, buffer, shape) for buffer in Buffer}
        self._images: dict[tuple[Buffer, int], int] = {}
        self.nbytes = 0
        for buffer in Buffer:
            for block, (_, length) in enumerate(self._bounds[buffer]):
                if length and has_image(buffer, block):
                    self._images[buffer, block] = self.nbytes
                    # The first segment is the longest.
                    longest = split(length, segments, 0)[1] * itemsize + _PACK
                    self.nbytes += -(-longest // _ALIGNMENT) * _ALIGNMENT

    def places(self, span: Span, segment: int) -> list[BlockPlace]:
        """Return the parts of `span` in `segment`, block by block, without empty parts."""
        return list(self._parts(span.buffer, self._plan.physical_blocks(span), segment))

    def images(self, buffer: Buffer, segment: int) -> list[BlockPlace]:
        """Return the parts of `buffer` in `segment` that have a copy in the slab, which other ranks read."""
        return list(self._parts(buffer, [block for of, block in self._images if of is buffer], segment))

    def _parts(self, buffer: Buffer, blocks: list[int], segment: int) -> Iterator[BlockPlace]:
        for block in blocks:
            first, length = self._bounds[buffer][block]
            start, count = split(length, self._segments, segment)
            if count:
                offset = (first + start) * self._itemsize
                image = self._images.get((buffer, block), -1)
                yield BlockPlace(buffer, offset, count, image if image < 0 else image + offset % _PACK)
