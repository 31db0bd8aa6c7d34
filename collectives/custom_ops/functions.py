"""Calls the Python function of a custom op: on pairs of arrays, in the order of ranks, with checks of its result.

Used by: `reducer.py` and `reduce_local`.
"""

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
    """Return whether `op` is a custom op, which combines arrays by a Python function."""
    return isinstance(op, Op) and op.combine is Combine.FUNCTION


def combine(op: Op, a: AnyArray, b: AnyArray, into: AnyArray) -> None:
    """Set `into` to the function's result for `a` and `b`; all three are flat, with the same length and dtype.

    `into` may be `a` or `b`. The result is copied at once, so the function may return an argument, or the same array
    each time. The function is not called for 0 elements. It runs in the default floating-point environment, so that all
    ranks compute the same bits.

    Raises:
        UsageError: the function returned something else than an array like its arguments.
        Exception: the exception that the function raised.
    """
    assert op.function is not None, "a custom op has a function"
    if a.size == 0:
        return
    with _core.DefaultFloatEnvironment():
        into[...] = _checked(op, op.function(_read_only(a), _read_only(b)), a)


def combine_all(op: Op, rows: AnyArray) -> AnyArray:
    """Return the combination of all rows by a balanced tree, which combines neighbours in pairs.

    Args:
        op: the custom op.
        rows: one or more rows, which are overwritten. The result is in the first row.
    """
    level: list[AnyArray] = list(rows)
    while len(level) > 1:
        for a, b in zip(level[::2], level[1::2], strict=False):
            combine(op, a, b, into=a)
        level = level[::2]
    return level[0]


def combine_in_sequence(op: Op, arrays: Sequence[AnyArray]) -> AnyArray:
    """Return the combination of one or more arrays from left to right, as a new array."""
    total: AnyArray = arrays[0].copy()
    for array in arrays[1:]:
        combine(op, total, array, into=total)
    return total


def combine_prefixes(op: Op, rows: AnyArray) -> None:
    """Replace each row by the combination of all rows up to it, from the first row on."""
    for before, row in pairwise(rows):
        combine(op, before, row, into=row)


def _read_only(array: AnyArray) -> AnyArray:
    view: AnyArray = array.view()
    view.flags.writeable = False
    return view


def _checked(op: Op, returned: Any, like: AnyArray) -> AnyArray:
    rule = f"{op.name} must return {like.dtype.name}[{like.size}], like its arguments"
    try:
        array: AnyArray = np.asarray(returned)
    except Exception as error:
        raise UsageError(
            f"{rule}; it returned something of type {type(returned).__name__}, which is no array"
        ) from error
    if array.shape == like.shape and array.dtype == like.dtype:
        return array
    if returned is None:
        raise UsageError(f"{rule}; it returned None")
    origin = "" if isinstance(returned, np.ndarray) else f"something of type {type(returned).__name__}, which is "
    shape = ",".join(map(str, array.shape))
    raise UsageError(f"{rule}; it returned {origin}{array.dtype.name}[{shape}]")
