"""Where gradients lie: flat memory of each dtype, in the order in which they become ready, cut into buckets.

Theory of operation. All gradients of one dtype lie one after the other in one array, so that each is contiguous also
where a bucket ends in it, and each bucket is a range of one array, so that it is reduced in place by a single call.
Each gradient begins at a multiple of `ALIGNMENT` bytes; the elements between are zero on every rank. Everything here is
a function of the table of gradients and the size of the buckets, which the ranks agree upon, and so the same on all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import ml_dtypes  # noqa: F401  (gives numpy the names bfloat16 and float8)
import numpy as np

ALIGNMENT = 64


class Gradient(NamedTuple):
    """What the ranks agree upon of one gradient: the name of its dtype is numpy's."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """How many there are."""
        return math.prod(self.shape)


class Bucket(NamedTuple):
    """Elements `start` to `stop` of the memory of a dtype; the gradients of which some or all lie in it."""

    dtype: str
    start: int
    stop: int
    names: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """The size in memory."""
        return (self.stop - self.start) * np.dtype(self.dtype).itemsize


class Filling(NamedTuple):
    """The bytes of a bucket, and how much of backward is over when it is full, 0 to 1, at an even pace."""

    nbytes: int
    share: float


class Layout(NamedTuple):
    """Where each gradient lies.

    Attributes:
        gradients: by name, in the order in which they become ready.
        offsets: by name, the element of the memory of its dtype at which a gradient begins.
        lengths: by dtype, the number of elements of its memory.
        buckets: in the order in which they become ready.
    """

    gradients: Mapping[str, Gradient]
    offsets: Mapping[str, int]
    lengths: Mapping[str, int]
    buckets: tuple[Bucket, ...]

    @property
    def nbytes(self) -> int:
        """The size of all buckets."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def fillings(self) -> list[Filling]:
        """Return how the buckets are filled, in their order."""
        made, sizes = 0, {}
        for name, gradient in self.gradients.items():
            sizes[name] = made = made + gradient.elements * np.dtype(gradient.dtype).itemsize
        last = [max(sizes[name] for name in bucket.names) for bucket in self.buckets]
        return [Filling(bucket.nbytes, at / max(made, 1)) for bucket, at in zip(self.buckets, last, strict=True)]

    def buckets_of(self) -> dict[str, tuple[int, ...]]:
        """Return the indices of the buckets in which each gradient lies."""
        found: dict[str, list[int]] = {name: [] for name in self.gradients}
        for index, bucket in enumerate(self.buckets):
            for name in bucket.names:
                found[name].append(index)
        return {name: tuple(indices) for name, indices in found.items()}


def layout_of(gradients: Iterable[Gradient], bucket_nbytes: int) -> Layout:
    """Return the layout of gradients that become ready in this order, in buckets of about so many bytes.

    A bucket ends before it would become larger; a gradient that is larger by itself is split into buckets of its own.
    """
    table = {gradient.name: gradient for gradient in gradients}
    offsets: dict[str, int] = {}
    open_: dict[str, _Open] = {}
    closed: list[Bucket] = []
    for gradient in table.values():
        bucket = open_.pop(gradient.dtype, None) or _Open(gradient.dtype)
        count = _padded(gradient.elements, bucket.itemsize)
        most = max(1, bucket_nbytes // bucket.itemsize)
        if bucket.names and bucket.stop + count - bucket.start > most:
            closed.append(bucket.closed())
            bucket = bucket.following()
        offsets[gradient.name] = bucket.stop
        bucket.names.append(gradient.name)
        bucket.stop += count
        if count > most:
            closed.extend(_pieces(bucket, most))
            bucket = bucket.following()
        open_[gradient.dtype] = (
            bucket  # at the end: of the last bucket of each dtype, that which is full first is first
        )
    closed.extend(bucket.closed() for bucket in open_.values() if bucket.names)
    lengths = {dtype: bucket.stop for dtype, bucket in open_.items()}
    return Layout(table, offsets, lengths, tuple(closed))


class _Open:
    """A bucket that is being filled."""

    def __init__(self, dtype: str, start: int = 0) -> None:
        self.dtype, self.start, self.stop = dtype, start, start
        self.itemsize = np.dtype(dtype).itemsize
        self.names: list[str] = []

    def closed(self) -> Bucket:
        return Bucket(self.dtype, self.start, self.stop, tuple(self.names))

    def following(self) -> _Open:
        return _Open(self.dtype, self.stop)


def _padded(count: int, itemsize: int) -> int:
    """Return the elements that a gradient takes, so that the next one is aligned."""
    step = max(1, ALIGNMENT // itemsize)
    return -(-count // step) * step


def _pieces(bucket: _Open, most: int) -> Sequence[Bucket]:
    """Return a bucket of one gradient in equal parts of at most so many elements, each but the last aligned."""
    count = bucket.stop - bucket.start
    step = _padded(-(-count // -(-count // most)), bucket.itemsize)
    return [
        Bucket(bucket.dtype, start, min(start + step, bucket.stop), tuple(bucket.names))
        for start in range(bucket.start, bucket.stop, step)
    ]
