"""The layout of gradients: flat memory for each dtype, in the order in which they become ready, cut into buckets.

Theory of operation
-------------------
All gradients of one dtype lie one after the other in one array. So a gradient is contiguous even if a bucket ends
inside it, and a bucket is a range of one array, which one call reduces in place. Each gradient begins at a multiple of
`ALIGNMENT` bytes; the padding between gradients is zero on every rank. The layout is a function of the gradients and
the size of buckets, on which the ranks agree, so all ranks compute the same layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import ml_dtypes  # noqa: F401  (gives numpy the names bfloat16 and float8)
import numpy as np

ALIGNMENT = 64


class Piece(NamedTuple):
    """The part of one gradient that lies in flat memory, from element `start` to before `stop`.

    Attributes:
        columns: the number of columns of the gradient as a matrix, whose rows are its first dimension.
        column: the column of the first element.
    """

    start: int
    stop: int
    columns: int
    column: int = 0


def columns_of(shape: Sequence[int]) -> int:
    """Return the number of columns of an array as a matrix, whose rows are its first dimension; 1 for a vector."""
    return max(1, math.prod(shape[1:]))


class Gradient(NamedTuple):
    """The name, shape and dtype of a gradient, on which the ranks agree. The dtype is numpy's name of it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """The number of elements of the piece."""
        return math.prod(self.shape)


class Bucket(NamedTuple):
    """The elements from `start` to before `stop` of the memory of a dtype.

    Attributes:
        names: the gradients that lie in the bucket, entirely or in part.
    """

    dtype: str
    start: int
    stop: int
    names: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return (self.stop - self.start) * np.dtype(self.dtype).itemsize


class Filling(NamedTuple):
    """The bytes of a bucket, and the share of backward, from 0 to 1, that is over when it is full, at an even pace."""

    nbytes: int
    share: float


class Layout(NamedTuple):
    """Where each gradient lies.

    Attributes:
        gradients: the gradients by name, in the order in which they become ready.
        offsets: by name, the index of the first element of a gradient in the memory of its dtype.
        lengths: by dtype, the number of elements of its memory.
        buckets: the buckets, in the order in which they become ready.
    """

    gradients: Mapping[str, Gradient]
    offsets: Mapping[str, int]
    lengths: Mapping[str, int]
    buckets: tuple[Bucket, ...]

    @property
    def nbytes(self) -> int:
        """The size of all buckets in bytes."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def fillings(self) -> list[Filling]:
        """Return the `Filling` of each bucket, in their order."""
        total, nbytes_after = 0, {}  # how many bytes are ready after each gradient
        for name, gradient in self.gradients.items():
            nbytes_after[name] = total = total + gradient.elements * np.dtype(gradient.dtype).itemsize
        ready_at = [max(nbytes_after[name] for name in bucket.names) for bucket in self.buckets]
        return [Filling(bucket.nbytes, at / max(total, 1)) for bucket, at in zip(self.buckets, ready_at, strict=True)]

    def pieces_of(self, bucket: Bucket) -> list[Piece]:
        """Return the parts of gradients that lie in a bucket."""
        pieces = []
        for name in bucket.names:
            gradient, begin = self.gradients[name], self.offsets[name]
            start, stop = max(begin, bucket.start), min(begin + gradient.elements, bucket.stop)
            if start < stop:
                columns = columns_of(gradient.shape)
                pieces.append(Piece(start - bucket.start, stop - bucket.start, columns, (start - begin) % columns))
        return pieces

    def buckets_of(self) -> dict[str, tuple[int, ...]]:
        """Return the indices of the buckets in which each gradient lies."""
        indices_of: dict[str, list[int]] = {name: [] for name in self.gradients}
        for index, bucket in enumerate(self.buckets):
            for name in bucket.names:
                indices_of[name].append(index)
        return {name: tuple(indices) for name, indices in indices_of.items()}


def layout_of(gradients: Iterable[Gradient], bucket_nbytes: int) -> Layout:
    """Return the layout of gradients, passed in the order in which they become ready.

    A bucket ends before it would exceed `bucket_nbytes`. A gradient that exceeds it alone is split into buckets of its
    own.
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
        # `pop` and this put the dtype last, so that the last buckets of the dtypes are in the order in which they fill.
        open_[gradient.dtype] = bucket
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
    """Return the number of elements that a gradient takes with the padding that aligns the next one."""
    step = max(1, ALIGNMENT // itemsize)
    return -(-count // step) * step


def _pieces(bucket: _Open, most: int) -> Sequence[Bucket]:
    """Cut a bucket of one gradient into equal parts of at most `most` elements. All but the last are aligned."""
    count = bucket.stop - bucket.start
    step = _padded(-(-count // -(-count // most)), bucket.itemsize)
    return [
        Bucket(bucket.dtype, start, min(start + step, bucket.stop), tuple(bucket.names))
        for start in range(bucket.start, bucket.stop, step)
    ]
