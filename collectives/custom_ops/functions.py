"""What functions of Python do in a reduction: which arrays they are given, in which order, and what they may return."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from unisono.errors import UsageError
from unisono.operations import Combine, Op
from unisono.transports import _core
from unisono.transports.contracts.call import AnyArray


def is_by_function(op: Any) -> bool:
    """Return whether `op` is an operation that combines by a function of Python."""
    return isinstance(op, Op) and op.combine is Combine.FUNCTION


def combine(op: Op, a: AnyArray, b: AnyArray, into: AnyArray) -> None:
    """Set `into` to what the function of `op` makes of `a` and `b`; all are flat, of one length and dtype.

    `into` may be one of the others. What the function returned is not used after that, so that it may return its
    arguments, or the same array each time. With 0 elements, it is not called. The function runs in the default
    floating-point environment, so that each rank computes the same bits.

    Raises:
        UsageError: it returned something else than an array like its arguments.
        Exception: what it raised.
    """
    assert op.function is not None, "it is an operation by a function"
    if a.size == 0:
        return
    with _core.DefaultFloatEnvironment():
        into[...] = _checked(op, op.function(_read_only(a), _read_only(b)), a)


def combine_all(op: Op, rows: AnyArray) -> AnyArray:
    """Return the combination of all `rows` by a balanced tree, neighbours in pairs; it is in the memory of the first.

    Args:
        op: the operation.
        rows: one or more, which are overwritten.
    """
    level: list[AnyArray] = list(rows)
    while len(level) > 1:
        for a, b in zip(level[::2], level[1::2], strict=False):
            combine(op, a, b, into=a)
        level = level[::2]
    return level[0]


def combine_in_sequence(op: Op, arrays: Sequence[AnyArray]) -> AnyArray:
    """Return the combination of one or more arrays, one after the other, as a new array."""
    total: AnyArray = arrays[0].copy()
    for each in arrays[1:]:
        combine(op, total, each, into=total)
    return total


def combine_prefixes(op: Op, rows: AnyArray) -> None:
    """Replace each of the `rows` by the combination of all up to it, one after the other."""
    for before, row in pairwise(rows):
        combine(op, before, row, into=row)


def _read_only(array: AnyArray) -> AnyArray:
    view: AnyArray = array.view()
    view.flags.writeable = False
    return view


def _checked(op: Op, returned: Any, like: AnyArray) -> AnyArray:
    wanted = f"{op.name} must return {like.dtype.name}[{like.size}], like its arguments"
    try:
        found: AnyArray = np.asarray(returned)
    except Exception as error:
        raise UsageError(
            f"{wanted}; it returned something of type {type(returned).__name__}, which is no array"
        ) from error
    if found.shape == like.shape and found.dtype == like.dtype:
        return found
    if returned is None:
        raise UsageError(f"{wanted}; it returned None")
    what = "" if isinstance(returned, np.ndarray) else f"something of type {type(returned).__name__}, which is "
    shape = ",".join(map(str, found.shape))
    raise UsageError(f"{wanted}; it returned {what}{found.dtype.name}[{shape}]")
