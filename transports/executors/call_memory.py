"""The memory of a call in the generic executor: maps the spans of a plan to views of the caller's arrays.

A buffer consists of the arrays of the call, one for each extent. A block may begin in one array and end in the next. If
the blocks are shares of the ranks, a block has a part of every array. SCRATCH has the extents of the buffer that it is
declared to be like.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from unisono.algorithms.ir.binding import Shape, bounds, pieces
from unisono.algorithms.ir.plan import Buffer, Span
from unisono.dtypes import DTYPES, DType
from unisono.errors import UsageError
from unisono.foundation.records import record
from unisono.operations import Op
from unisono.transports.contracts.call import AnyArray, Call, Extent, Operand
from unisono.transports.reductions.definition import numpy_dtype

# A barrier has no data. Its messages carry one element of this type, which the executor provides as INPUT.
_TOKENS = (Extent((1, 1), DTYPES["uint8"], None),)
_TOKEN_SHAPE = Shape((1, 1), {})


@record
class OperandView:
    """Contiguous elements of one dtype, and the operation that reduces them; None if nothing is reduced."""

    array: AnyArray
    op: Op | None

    def like(self, array: AnyArray) -> OperandView:
        """Return a view of `array`, with the operation of this view."""
        return OperandView(array, self.op)

    def empty(self) -> OperandView:
        """Return a view of new, uninitialised elements of the same number."""
        return self.like(np.empty_like(self.array))


class Memory:
    """INPUT, OUTPUT and SCRATCH of one call. It allocates SCRATCH, for as long as the call runs.

    Args:
        call: the call, whose plan and segments cut the memory.
        source, target: INPUT and OUTPUT. One in which the plan has no elements is ignored, and may be None.

    Attributes:
        output_written: whether a step has been asked to write to OUTPUT.

    Raises:
        UsageError: `source` or `target` does not fit the call.
    """

    def __init__(self, call: Call, source: Operand, target: Operand) -> None:
        extents, shape = (call.extents, call.shape) if call.extents else (_TOKENS, _TOKEN_SHAPE)
        self.output_written = False
        self._call = call
        self._plan = call.plan
        self._segments = call.segments
        self._bounds = [bounds(call.plan, buffer, shape) for buffer in Buffer]
        if not call.extents:
            source, target = [np.zeros(1, np.uint8)], [np.zeros(1, np.uint8)]
        self._views = [
            self._bound("source", source, extents, Buffer.INPUT),
            self._bound("target", target, extents, Buffer.OUTPUT),
        ]
        self._views.append(self._scratch(extents))

    def views(self, span: Span, segment: int) -> list[OperandView]:
        """Return the memory of `span` in `segment`, for reading: a view for each part of a block in an extent."""
        ranges = pieces(self._plan, span, self._bounds[span.buffer], segment, self._segments)
        return [view for offset, length in ranges for view in _cut(self._views[span.buffer], offset, length)]

    def views_to_write(self, span: Span, segment: int) -> list[OperandView]:
        """Return the memory of `span` in `segment`, for writing."""
        views = self.views(span, segment)
        self.output_written |= span.buffer is Buffer.OUTPUT and bool(views)
        return views

    def bytes_to_read(self, span: Span, segment: int) -> list[memoryview]:
        """Return the memory of `views` as bytes."""
        return [as_bytes(view.array) for view in self.views(span, segment)]

    def bytes_to_write(self, span: Span, segment: int) -> list[memoryview]:
        """Return the memory of `views_to_write` as bytes."""
        return [as_bytes(view.array) for view in self.views_to_write(span, segment)]

    def _bound(self, name: str, operand: Operand, extents: Sequence[Extent], buffer: Buffer) -> list[OperandView]:
        """Return the views of which INPUT or OUTPUT consists, in the order of its blocks."""
        arrays = checked_extents(name, operand, extents, buffer, self._length(buffer))
        views = [OperandView(array, extent.op) for array, extent in zip(arrays, extents, strict=False)]
        if not self._call.is_shared(buffer) or not views:
            return views
        shares = [_shares(view, len(self._bounds[buffer])) for view in views]
        return [view for block in zip(*shares, strict=True) for view in block]

    def _length(self, buffer: Buffer) -> int:
        return sum(length for _, length in self._bounds[buffer])

    def _scratch(self, extents: Sequence[Extent]) -> list[OperandView]:
        """Return new memory for SCRATCH. If SCRATCH has block lengths of its own, the call has one extent."""
        partition = self._plan.partition(Buffer.SCRATCH)
        if partition.like is None:
            return [OperandView(np.empty(self._length(Buffer.SCRATCH), numpy_dtype(extents[0].dtype)), extents[0].op)]
        like, whole = self._views[partition.like], (0, self._length(partition.like))
        copied = whole if partition.block is None else self._bounds[partition.like][partition.block]
        return [view.empty() for _ in range(partition.copies) for view in _cut(like, *copied)]


def _shares(view: OperandView, parts: int) -> list[OperandView]:
    """Return the equal parts of a view."""
    return [view.like(array) for array in np.split(view.array, parts)]


def _cut(views: Sequence[OperandView], offset: int, length: int) -> Iterator[OperandView]:
    """Yield the parts of `views` between elements `offset` and `offset + length`, counted over all views together."""
    start = 0
    for view in views:
        first, last = max(offset - start, 0), min(offset + length - start, view.array.size)
        if first < last:
            yield view.like(view.array[first:last])
        start += view.array.size


def checked_extents(
    name: str, operand: Operand, extents: Sequence[Extent], buffer: Buffer, length: int
) -> list[AnyArray]:
    """Return the arrays of `operand`, one for each of `extents`; none if the `length` of the whole buffer is 0.

    Raises:
        UsageError: the number of arrays is wrong, or one does not fit its extent; the message calls them `name`.
    """
    if length == 0:
        return []
    arrays = arrays_of(operand)
    if len(arrays) != len(extents):
        raise UsageError(f"{name} must be {len(extents)} arrays, not {len(arrays)}")
    return [
        checked(name, array, extent.dtype, extent.elements[buffer])
        for array, extent in zip(arrays, extents, strict=True)
    ]


def arrays_of(operand: Operand) -> Sequence[AnyArray | None]:
    """Return the arrays of `operand`, one for each extent."""
    return [operand] if operand is None or isinstance(operand, np.ndarray) else operand


def checked(name: str, array: AnyArray | None, dtype: DType, length: int) -> AnyArray:
    """Return `array`, which must be flat, C-contiguous and of `length` elements of `dtype`.

    If `length` is 0, `array` may be None or anything else, and an empty array is returned.

    Raises:
        UsageError: `array` does not fit; the message calls it `name`.
    """
    if length == 0:
        return np.empty(0, numpy_dtype(dtype))
    if array is None or array.ndim != 1 or not array.flags.c_contiguous:
        raise UsageError(f"{name} must be a flat C-contiguous array of {length} elements of {dtype.name}")
    if array.dtype.name != dtype.name or array.size != length:
        raise UsageError(f"{name} must be {dtype.name}[{length}]; got {array.dtype.name}[{array.size}]")
    return array


def flat(views: Sequence[OperandView]) -> list[OperandView]:
    """Return `views` with neighbours of the same dtype and operation joined, by a copy if there are several.

    So operands of the same elements become equal in form even if they are cut differently.
    """
    runs = [list(run) for _, run in groupby(views, key=lambda view: (view.array.dtype, view.op))]
    return [run[0] if len(run) == 1 else run[0].like(np.concatenate([view.array for view in run])) for run in runs]


def scatter(views: Sequence[OperandView], values: Sequence[OperandView]) -> None:
    """Copy `values` to `views`, in order. Each value has the elements of one or several whole views."""
    start = 0
    remaining = iter(values)
    value: AnyArray = np.empty(0)
    for view in views:
        if start == value.size:
            start, value = 0, next(remaining).array
        view.array[...] = value[start : start + view.array.size]
        start += view.array.size


def as_bytes(view: AnyArray) -> memoryview:
    """Return the memory of a contiguous array as bytes."""
    return view.view(np.uint8).data
