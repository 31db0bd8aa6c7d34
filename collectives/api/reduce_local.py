"""Reduction of arrays of this process, by the same arithmetic as that of the collectives."""

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
    """Set `dst` to ``dst ∘ sources[0] ∘ sources[1] ∘ …``, element by element, and return it; no rank is asked.

    The combinations are those of `Communicator.allreduce`, from left to right; narrow floats are computed in float32
    and rounded once for all of them. An average divides by the number of arrays, `dst` among them.

    Args:
        dst: writable, contiguous numpy array, which is overwritten.
        sources: numpy arrays of the shape and dtype of `dst`, in any memory order. They are not changed. Each may be
            `dst` itself, but must not overlap it otherwise.
        op: an operation, or the name of one, but premul_sum, whose factor is that of a rank.

    Raises:
        UsageError: an array or the operation is not like that, or what its function returned; `dst` is as it was. So it
            is if the function raises, which is raised as it is.

    >>> import numpy as np, unisono as un
    >>> un.reduce_local(np.array([1, 5, 3]), np.array([4, 2, 6]), np.array([0, 9, 1]), op="max")
    array([4, 9, 6])
    """
    found, target = operation(op), operands.target(dst, "dst")
    found.check(target.dtype)
    if found.factor is not None:
        raise UsageError(f"{found.name} has the factor of a rank: multiply the arrays, and reduce them with op='sum'")
    elements = [_operand(source, f"sources[{index}]", target) for index, source in enumerate(sources)]
    if is_by_function(found):
        target.flat[...] = combine_in_sequence(found, [target.flat, *elements])
        return dst
    reduce_into(target.flat, [target.flat, *elements], found, 1 + len(sources))
    return dst


def _operand(source: Any, name: str, target: Operand) -> AnyArray:
    """Return the elements of `source`, which errors call `name`, in the memory order of `target`."""
    found = operands.source(source, name)
    if (found.dtype, found.shape) != (target.dtype, target.shape):
        raise UsageError(
            f"{name} is {found.dtype.name} of shape {found.shape} and dst is {target.dtype.name} of shape "
            f"{target.shape}: they must be the same"
        )
    if found.order != target.order:
        found = operands.source(np.asarray(source, order="F" if target.order == "F" else "C"))
    operands.share_memory(target, found, 0)
    return found.flat
