"""`reduce_local` reduces arrays of one process with the arithmetic of the collectives, and sends nothing."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from unisono.collectives.arrays import operands
from unisono.collectives.arrays.operands import Operand
from unisono.collectives.custom_ops.functions import combine_in_sequence, is_by_function
from unisono.errors import UsageError
from unisono.operations import Op, operation
from unisono.transports.contracts.call import AnyArray
from unisono.transports.reductions.native import reduce_into

Array = TypeVar("Array", bound=AnyArray)


def reduce_local(dst: Array, *sources: AnyArray, op: str | Op = "sum") -> Array:
    """Set `dst` to ``dst ∘ sources[0] ∘ sources[1] ∘ …``, element by element, and return it; nothing is sent.

    It combines as `Communicator.allreduce` does, from left to right. Floats of 8 and 16 bits are computed in float32,
    and rounded once at the end. An average divides by the number of arrays, `dst` included.

    Args:
        dst: a writable, contiguous numpy array, which is overwritten.
        sources: numpy arrays of the shape and dtype of `dst`, in any memory order. They are not changed. Each may be
            `dst` itself, but must not overlap it otherwise.
        op: an operation, or the name of one. Op.premul_sum is not allowed, because its factor belongs to a rank.

    Raises:
        UsageError: an array or the operation breaks one of these rules, or the function of the operation returned a
        wrong value.
            `dst` is unchanged then.
        Exception: the exception that the function raised; `dst` is unchanged then.

    >>> import numpy as np, unisono as un
    >>> un.reduce_local(np.array([1, 5, 3]), np.array([4, 2, 6]), np.array([0, 9, 1]), op="max")
    array([4, 9, 6])
    """
    reduction, target = operation(op), operands.target(dst, "dst")
    reduction.check(target.dtype)
    if reduction.factor is not None:
        raise UsageError(
            f"{reduction.name} has a factor for the array of one rank: multiply the arrays, and reduce them by op='sum'"
        )
    elements = [_operand(source, f"sources[{index}]", target) for index, source in enumerate(sources)]
    if is_by_function(reduction):
        target.flat[...] = combine_in_sequence(reduction, [target.flat, *elements])
        return dst
    reduce_into(target.flat, [target.flat, *elements], reduction, 1 + len(sources))
    return dst


def _operand(source: Any, name: str, target: Operand) -> AnyArray:
    """Return the elements of `source` in the memory order of `target`; errors call the array `name`."""
    operand = operands.source(source, name)
    if (operand.dtype, operand.shape) != (target.dtype, target.shape):
        raise UsageError(
            f"{name} is {operand.dtype.name} of shape {operand.shape} and dst is {target.dtype.name} of shape "
            f"{target.shape}: pass arrays of the same dtype and shape"
        )
    if operand.order != target.order:
        operand = operands.source(np.asarray(source, order="F" if target.order == "F" else "C"))
    operands.share_memory(target, operand, 0)
    return operand.flat
