"""The memory of a call in the generic executor: which views of which arrays the spans of a plan stand for.

A buffer is a list of arrays, the extents of the call, and a block may begin in one of them and end in another; or, of
shares, it has its part of each of them. SCRATCH has extents as the buffer that it is like.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from unisono.algorithms.ir.binding import Shape, bounds, pieces
from unisono.algorithms.ir.plan import Buffer, Span
from unisono.dtypes import DTYPES, DType
from unisono.errors import UsageError
from unisono.operations import Op
from unisono.records import record
from unisono.transports.contracts.call import AnyArray, Call, Extent, Operand
from unisono.transports.reductions.definition import numpy_dtype

# A barrier moves no data; its messages carry one element of this type, which the executor provides as INPUT.
_TOKENS = (Extent((1, 1), DTYPES["uint8"], None),)
_TOKEN_SHAPE = Shape((1, 1), {})


@record
class View:
    """Contiguous elements of one type, and the operation that reduces them; None where nothing is reduced."""

    array: AnyArray
    op: Op | None

    def like(self, array: AnyArray) -> View:
        """Return the view of other elements."""
        return View(array, self.op)

    def empty(self) -> View:
        """Return a view of as many new elements."""
        return self.like(np.empty_like(self.array))


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

    def views(self, span: Span, segment: int) -> list[View]:
        """Return what `span` covers in `segment`, to be read: a view for what each block has of each extent."""
        found = pieces(self._plan, span, self._bounds[span.buffer], segment, self._segments)
        return [view for offset, length in found for view in _cut(self._views[span.buffer], offset, length)]

    def views_to_write(self, span: Span, segment: int) -> list[View]:
        """Return what `span` covers in `segment`, to be written."""
        views = self.views(span, segment)
        self.output_written |= span.buffer is Buffer.OUTPUT and bool(views)
        return views

    def bytes_to_read(self, span: Span, segment: int) -> list[memoryview]:
        """Return what `views` does, as bytes."""
        return [as_bytes(view.array) for view in self.views(span, segment)]

    def bytes_to_write(self, span: Span, segment: int) -> list[memoryview]:
        """Return what `views_to_write` does, as bytes."""
        return [as_bytes(view.array) for view in self.views_to_write(span, segment)]

    def _bound(self, name: str, operand: Operand, extents: Sequence[Extent], buffer: Buffer) -> list[View]:
        """Return the views of which the blocks of INPUT or OUTPUT consist, one after the other."""
        arrays = checked_extents(name, operand, extents, buffer, self._length(buffer))
        views = [View(array, extent.op) for array, extent in zip(arrays, extents, strict=False)]
        if not self._call.is_shared(buffer) or not views:
            return views
        shares = [_shares(view, len(self._bounds[buffer])) for view in views]
        return [view for block in zip(*shares, strict=True) for view in block]

    def _length(self, buffer: Buffer) -> int:
        return sum(length for _, length in self._bounds[buffer])

    def _scratch(self, extents: Sequence[Extent]) -> list[View]:
        """Return new memory. Where SCRATCH has counts of its own, the call has one extent."""
        partition = self._plan.partition(Buffer.SCRATCH)
        if partition.like is None:
            return [View(np.empty(self._length(Buffer.SCRATCH), numpy_dtype(extents[0].dtype)), extents[0].op)]
        like, whole = self._views[partition.like], (0, self._length(partition.like))
        copied = whole if partition.block is None else self._bounds[partition.like][partition.block]
        return [view.empty() for _ in range(partition.copies) for view in _cut(like, *copied)]


def _shares(view: View, parts: int) -> list[View]:
    """Return the equal parts of a view."""
    return [view.like(array) for array in np.split(view.array, parts)]


def _cut(views: Sequence[View], offset: int, length: int) -> Iterator[View]:
    """Yield the parts of `views`, which lie one after the other, that are in `length` elements from `offset` on."""
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
        UsageError: there are not as many, or one does not fit its extent; the message calls them `name`.
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


def flat(views: Sequence[View]) -> list[View]:
    """Return `views` with those joined that follow each other and have one type and operation, mostly by a copy.

    Operands that are cut differently, but consist of the same elements, so become alike.
    """
    runs = [list(run) for _, run in groupby(views, key=lambda view: (view.array.dtype, view.op))]
    return [run[0] if len(run) == 1 else run[0].like(np.concatenate([view.array for view in run])) for run in runs]


def scatter(views: Sequence[View], values: Sequence[View]) -> None:
    """Set `views`, one after the other, to `values`."""
    start = 0
    rest = iter(values)
    value: AnyArray = np.empty(0)
    for view in views:
        if start == value.size:
            start, value = 0, next(rest).array
        view.array[...] = value[start : start + view.array.size]
        start += view.array.size


def as_bytes(view: AnyArray) -> memoryview:
    """Return the memory of a contiguous array as bytes."""
    return view.view(np.uint8).data
