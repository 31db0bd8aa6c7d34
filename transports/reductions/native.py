"""The native kernels, one call at a time."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.dtypes import DTYPES
from unisono.operations import Lower, Op
from unisono.transports import _core
from unisono.transports.contracts.call import AnyArray
from unisono.transports.executors.call_memory import as_bytes


def divisor(op: Op, size: int) -> int:
    """Return what kernels take for the lowering of results from `size` contributions.

    They divide sums by it from 2 on. For 1, a single state is its own result; for 0, they make a result of it.
    """
    return {Lower.IDENTITY: 1, Lower.DIVIDE_BY_SIZE: size, Lower.TRUTH: 0}[op.lower]


def reduce_into(dst: AnyArray, sources: Sequence[AnyArray], op: Op, size: int) -> None:
    """Set `dst` to sources[0] ∘ sources[1] ∘ …, lowered: `reductions.reduce_into`, which defines it, done natively.

    Args:
        dst: flat contiguous array that is overwritten; it may be the same memory as any of the sources.
        sources: one or more flat contiguous arrays of the shape and dtype of `dst`.
        op: the operation; the caller has checked that it is defined for the dtype.
        size: number of contributions to the whole reduction, by which an average divides.
    """
    code = DTYPES[dst.dtype.name].code
    _core.reduce(as_bytes(dst), [as_bytes(source) for source in sources], code, int(op.combine), divisor(op, size))
