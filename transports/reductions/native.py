"""Calls the native reduction kernels from Python."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.dtypes import DTYPES
from unisono.operations import Lower, Op
from unisono.transports import _core
from unisono.transports.contracts.call import AnyArray
from unisono.transports.executors.call_memory import as_bytes


def divisor(op: Op, size: int) -> int:
    """Return the parameter by which kernels lower results of `size` contributions.

    From 2 on, kernels divide by it. 1 leaves a state as it is, and 0 turns a state into a truth value.
    """
    return {Lower.IDENTITY: 1, Lower.DIVIDE_BY_SIZE: size, Lower.TRUTH: 0}[op.lower]


def reduce_into(dst: AnyArray, sources: Sequence[AnyArray], op: Op, size: int) -> None:
    """Set `dst` to sources[0] ∘ sources[1] ∘ …, lowered, with a native kernel. `definition.reduce_into` defines it.

    Args:
        dst: flat contiguous array that is overwritten. It may be one of the sources.
        sources: one or more flat contiguous arrays of the shape and dtype of `dst`.
        op: the operation; the caller has checked that it is defined for the dtype.
        size: the number of contributions to the whole reduction, by which an average divides.
    """
    code = DTYPES[dst.dtype.name].code
    _core.reduce(as_bytes(dst), [as_bytes(source) for source in sources], code, int(op.combine), divisor(op, size))
