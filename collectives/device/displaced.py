"""Shares at displacements in GPU arrays, which are copied on the device, on the stream of the caller.

Used by: `calls/displaced.py`, which explains the idea.
"""

from __future__ import annotations

from math import prod
from typing import Any

from unisono.collectives.arrays.operands import Operand
from unisono.collectives.calls.row_blocks import Blocks, Moved
from unisono.collectives.device.adapters import DeviceArrays
from unisono.collectives.device.result_array import DeviceArray, order_streams
from unisono.errors import UsageError


def device_source(x: Any, blocks: Blocks) -> Moved:
    """Return a new array for the shares that a call reads from the GPU array `x`.

    Raises:
        UsageError: `x` is not contiguous, or a share ends behind it. Other errors are those of `DeviceArrays.source`.
    """
    memory = DeviceArrays()
    operand = memory.source(x, any_order=False)
    if operand.is_packed:
        raise UsageError("x is not contiguous, and displacements are of rows in its memory: pass a contiguous array")
    return _beside(memory, operand, blocks, writes=False)


def device_target(out: Any, blocks: Blocks) -> Moved:
    """Return a new array for the shares that a call writes to the GPU array `out`.

    Raises:
        UsageError: a share ends behind `out`. Other errors are those of `DeviceArrays.target`.
    """
    memory = DeviceArrays()
    return _beside(memory, memory.target(out), blocks, writes=True)


def _beside(memory: DeviceArrays, operand: Operand, blocks: Blocks, *, writes: bool) -> Moved:
    name = "out" if writes else "x"
    blocks.check_inside(name, operand.shape)
    if operand.order == "F":
        raise UsageError(f"{name} is in F order, where rows are not contiguous: pass one in C order")
    array, beside = memory.new((blocks.total, *operand.shape[1:]), operand)
    row_nbytes = prod(operand.shape[1:]) * operand.dtype.itemsize

    def move() -> None:
        stream, *others = memory.streams()  # a new array may have a stream of its own
        for other_stream in others:
            order_streams(memory.device, stream, other_stream)
        for _, rows, place in blocks.blocks:
            own = operand.flat.ctypes.data + rows.start * row_nbytes
            other = beside.flat.ctypes.data + place.start * row_nbytes
            target, source = (own, other) if writes else (other, own)
            if row_nbytes:
                memory.device.copy(target, source, (rows.stop - rows.start) * row_nbytes, stream)
        for other_stream in others:
            order_streams(memory.device, other_stream, stream)
        if isinstance(array, DeviceArray):
            array.note_use(stream)

    return Moved(array, move)
