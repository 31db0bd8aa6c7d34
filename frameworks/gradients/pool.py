"""The layout that there is, and all memory of it: that of steps, used again and again, and that of residuals."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from unisono.frameworks.arrays import Array
from unisono.frameworks.gradients.bucket_comms import Lanes
from unisono.frameworks.gradients.layout import Gradient, layout_of
from unisono.frameworks.gradients.memory import Memory, Slots, residuals
from unisono.frameworks.gradients.timeline import Span
from unisono.frameworks.gradients.two_stage_reduction import Pending


class Pool:
    """The memory of one layout after the other.

    Args:
        lanes: what carries buckets.
        gradients: in the order in which they become ready.
        bucket_nbytes: about the size of a bucket.
        turns: the indices of the buckets, in the order in which they are started; by default, as they become ready.
        before: the pool of the layout before, of which what compression has left is taken over.

    Attributes:
        layout: where gradients lie.
        turns: the order in which buckets are started.
        residuals: what compression has left of each; None if nothing is compressed.
    """

    def __init__(
        self,
        lanes: Lanes,
        gradients: Iterable[Gradient],
        bucket_nbytes: int,
        turns: Sequence[int] = (),
        before: Pool | None = None,
    ) -> None:
        lanes.open()
        self.layout = layout_of(gradients, bucket_nbytes)
        self.turns = tuple(turns) or tuple(range(len(self.layout.buckets)))
        self.residuals: Slots | None = None
        if any(lanes.compresses(dtype) for dtype in self.layout.lengths):
            self.residuals = residuals(self.layout)
            self.residuals.write(before.left() if before else {})
        self._lanes = lanes
        self._algorithms = [lanes.algorithm(bucket.nbytes, bucket.dtype) for bucket in self.layout.buckets]
        self._free: deque[Memory] = deque()
        self._made = 0

    def take(self) -> Memory:
        """Return memory that is free, or new."""
        if self._free:
            return self._free.popleft()
        self._made += 1
        return Memory(self.layout, self.turns, self._reduction)

    def give_back(self, memory: Memory) -> None:
        """Let memory be used again, if it has this layout."""
        if memory.layout is self.layout:
            self._free.append(memory)

    def spans(self) -> list[Span]:
        """Return the records of the buckets of a step, without times."""
        return [Span(*each) for each in zip(self.layout.buckets, self._algorithms, strict=True)]

    def left(self) -> dict[str, Array]:
        """Return copies of what compression has left, by name."""
        shaped = self.residuals.shaped if self.residuals is not None else {}
        return {name: array.copy() for name, array in shaped.items()}

    def _reduction(self, index: int, memory: Array) -> Callable[[], Pending]:
        is_compressed = self._lanes.compresses(self.layout.buckets[index].dtype)
        residual = self.residuals.buckets[index] if self.residuals is not None and is_compressed else None
        return self._lanes.reduction(self._made, self.turns.index(index), memory, residual)
