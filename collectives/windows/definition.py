"""Defines the operations on a part of a window, in numpy. The native `WindowPart` is tested against it.

It changes elements one after the other, in the order of the selection, so an element that is selected twice is changed
twice. It is not atomic: the native core defines nothing else, but does each change of an element in one step.
"""

from __future__ import annotations

import numpy as np

from unisono.collectives.windows.operations import NO_OP, REPLACE
from unisono.dtypes import DTYPES, DType
from unisono.operations import OPERATIONS, Combine, Lower
from unisono.transports.contracts.call import AnyArray
from unisono.transports.reductions.definition import numpy_dtype, reduce_into

_DTYPES = {dtype.code: dtype for dtype in DTYPES.values()}
_OPS = {op.combine: op for op in OPERATIONS.values() if op.lower is not Lower.DIVIDE_BY_SIZE}


class DefinedPart:
    """The memory that one rank exposes, an array of bytes. The arguments are those of the native `WindowPart`."""

    def __init__(self, memory: AnyArray) -> None:
        self._memory = memory

    def put(self, dtype: int, start: int, count: int, step: int, indices: AnyArray | None, source: AnyArray) -> None:
        """Copy `source` to the elements."""
        elements = self._elements(_DTYPES[dtype])
        for position, value in zip(self._positions(elements, start, count, step, indices), source, strict=True):
            elements[position] = value

    def get(self, dtype: int, start: int, count: int, step: int, indices: AnyArray | None, target: AnyArray) -> None:
        """Copy the elements to `target`."""
        elements = self._elements(_DTYPES[dtype])
        target[:] = elements[self._positions(elements, start, count, step, indices)]

    def accumulate(
        self,
        dtype: int,
        op: int,
        start: int,
        count: int,
        step: int,
        indices: AnyArray | None,
        operand: AnyArray,
        result: AnyArray | None,
    ) -> None:
        """Set each element to element ∘ operand, and store its value before in `result`, which may be `operand`."""
        elements = self._elements(_DTYPES[dtype])
        for index, position in enumerate(self._positions(elements, start, count, step, indices)):
            element = elements[position : position + 1]
            before, value = element.copy(), operand[index : index + 1].copy()
            if op == REPLACE:
                element[:] = value
            elif op != NO_OP:
                reduce_into(element, [before, value], _OPS[Combine(op)], 1, lower=True)
            if result is not None:
                result[index : index + 1] = before

    def compare_and_swap(self, dtype: int, position: int, compared: AnyArray, value: AnyArray) -> None:
        """Replace an element by `value` if it has the bits of `compared`; store its value before in `value`."""
        elements = self._elements(_DTYPES[dtype])
        (index,) = self._positions(elements, position, 1, 1, None)
        before = elements[index : index + 1].copy()
        if before.tobytes() == compared.tobytes():
            elements[index] = value[()]
        value[()] = before[0]

    def _elements(self, dtype: DType) -> AnyArray:
        nbytes = self._memory.size - self._memory.size % dtype.itemsize
        return self._memory[:nbytes].view(numpy_dtype(dtype))

    @staticmethod
    def _positions(elements: AnyArray, start: int, count: int, step: int, indices: AnyArray | None) -> list[int]:
        """Return the selected positions; raises IndexError if one is not in the part."""
        positions = [start + i * step for i in range(count)] if indices is None else indices.tolist()
        if any(not 0 <= position < elements.size for position in positions) or count < 0:
            raise IndexError("the elements are not in the window")
        return positions


def bytes_of(elements: int, dtype: DType) -> AnyArray:
    """Return zeroed memory for a part, aligned for elements of 16 bytes."""
    room = np.zeros(elements * dtype.itemsize + 16, np.uint8)
    begin = -room.__array_interface__["data"][0] % 16
    return room[begin : begin + elements * dtype.itemsize]
