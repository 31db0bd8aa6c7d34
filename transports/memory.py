"""The memory of a call in the generic executor: which views of which arrays the spans of a plan stand for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unisono.algorithms.binding import Shape, bounds, pieces
from unisono.algorithms.plan import Buffer, Span
from unisono.dtypes import DTYPES, DType
from unisono.errors import UsageError
from unisono.transports.base import AnyArray, Call
from unisono.transports.reductions import numpy_dtype

# A barrier moves no data; its messages carry one element of this type, which the executor provides as INPUT.
_TOKEN_DTYPE = DTYPES["uint8"]
_TOKEN_SHAPE = Shape((1, 1), {})


class Memory:
    """INPUT, OUTPUT and SCRATCH of one call; SCRATCH is allocated here and lives as long as the call.

    Args:
        call: the call, whose plan and segments cut the memory.
        source, target: INPUT and OUTPUT; each may be None, or anything, where the plan has no elements in it.

    Attributes:
        output_written: whether anything of OUTPUT has been, or is being, written.

    Raises:
        UsageError: `source` or `target` does not fit the call.
    """

    def __init__(self, call: Call, source: AnyArray | None, target: AnyArray | None) -> None:
        dtype, shape = (call.dtype, call.shape) if call.dtype else (_TOKEN_DTYPE, _TOKEN_SHAPE)
        self.output_written = False
        self._plan = call.plan
        self._segments = call.segments
        self._bounds = [bounds(call.plan, buffer, shape) for buffer in Buffer]
        lengths = [sum(length for _, length in blocks) for blocks in self._bounds]
        if call.dtype is None:
            source, target = (np.zeros(length, numpy_dtype(dtype)) for length in lengths[:2])
        self._arrays = (
            checked("source", source, dtype, lengths[Buffer.INPUT]),
            checked("target", target, dtype, lengths[Buffer.OUTPUT]),
            np.empty(lengths[Buffer.SCRATCH], numpy_dtype(dtype)),
        )

    def views(self, span: Span, segment: int) -> list[AnyArray]:
        """Return what `span` covers in `segment`, to be read: one view for each block that is not empty."""
        found = pieces(self._plan, span, self._bounds[span.buffer], segment, self._segments)
        return [self._arrays[span.buffer][offset : offset + length] for offset, length in found]

    def views_to_write(self, span: Span, segment: int) -> list[AnyArray]:
        """Return what `span` covers in `segment`, to be written."""
        views = self.views(span, segment)
        self.output_written |= span.buffer is Buffer.OUTPUT and bool(views)
        return views

    def bytes_to_read(self, span: Span, segment: int) -> list[memoryview]:
        """Return what `views` does, as bytes."""
        return [as_bytes(view) for view in self.views(span, segment)]

    def bytes_to_write(self, span: Span, segment: int) -> list[memoryview]:
        """Return what `views_to_write` does, as bytes."""
        return [as_bytes(view) for view in self.views_to_write(span, segment)]


def checked(name: str, array: AnyArray | None, dtype: DType, length: int) -> AnyArray:
    """Return `array` if it is a flat C-contiguous array of `length` elements of `dtype`; anything if `length` is 0.

    Raises:
        UsageError: it is something else; the message calls it `name`.
    """
    if length == 0:
        return np.empty(0, numpy_dtype(dtype))
    if array is None or array.ndim != 1 or not array.flags.c_contiguous:
        raise UsageError(f"{name} must be a flat C-contiguous array of {length} elements of {dtype.name}")
    if array.dtype.name != dtype.name or array.size != length:
        raise UsageError(f"{name} must be {dtype.name}[{length}]; got {array.dtype.name}[{array.size}]")
    return array


def flat(views: Sequence[AnyArray]) -> AnyArray:
    """Return one array over all of `views` (at least one): the view itself if it is alone, otherwise a copy."""
    return views[0] if len(views) == 1 else np.concatenate(views)


def scatter(views: Sequence[AnyArray], values: AnyArray) -> None:
    """Set `views`, one after the other, to `values`."""
    start = 0
    for view in views:
        view[...] = values[start : start + view.size]
        start += view.size


def as_bytes(view: AnyArray) -> memoryview:
    """Return the memory of a contiguous array as bytes."""
    return view.view(np.uint8).data
