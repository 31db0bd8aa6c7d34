"""The calls on arrays of numpy, of which TensorFlow and Keras make calls on tensors. Each waits for its results.

Arrays that are passed are not changed. The errors are those of the calls of torch: see `torch.calls`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unisono.compat.horovod import adasum
from unisono.compat.horovod.arguments import named, root_of, rows_to_ranks
from unisono.compat.horovod.entries import StartedCall
from unisono.compat.horovod.errors import ArgumentError
from unisono.compat.horovod.job import calls_of
from unisono.compat.horovod.process_sets import ProcessSet, global_process_set
from unisono.compat.horovod.requests import ReadyCall
from unisono.frameworks.arrays import Array


def allreduce(
    arrays: Sequence[Array],
    op: str,
    scales: tuple[float, float] = (1.0, 1.0),
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Return the reductions of the arrays of a list over all ranks, by one call.

    Args:
        arrays: arrays of the same shapes and dtypes on all ranks.
        op: the name of the reduction, as `arguments.op_of` returns it.
        scales: the factors by which arrays are multiplied before and after.
        name: the name by which ranks match the call.
        process_set: the ranks.
    """
    if op == "adasum":
        adasum.check_size(calls_of(process_set).comm.size)
    before, after = map(float, scales)
    facts = {"op": op, "scales": (before, after)}
    copies = [_scaled(np.array(x), before) for x in arrays]
    result: list[Array] = _made(
        "allreduce", copies, lambda reduced: [_scaled(x, after) for x in reduced], name, process_set, facts
    )
    return result


def allgather(
    arrays: Sequence[Array], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """Return for each array the rows of all ranks, in the order of ranks, by one call. Their numbers may differ."""
    result: list[Array] = _made("allgather", _with_rows(arrays, "allgather"), list, name, process_set)
    return result


def broadcast(
    arrays: Sequence[Array], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """Return the arrays of the rank `root_rank` of the job, by one call."""
    facts = {"root": root_of(root_rank, process_set)}
    result: list[Array] = _made("broadcast", [np.array(x) for x in arrays], list, name, process_set, facts)
    return result


def alltoall(
    x: Array, splits: Sequence[int] = (), name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Array, list[int]]:
    """Send each rank some rows; return the received rows, in the order of ranks, and how many came from each.

    Args:
        x: an array with the same dtype and row shape on all ranks.
        splits: how many rows each rank gets; by default equal parts.
        name: the name by which ranks match the call.
        process_set: the ranks.
    """
    rows = _with_rows([x], "alltoall")
    facts = {"splits": rows_to_ranks(splits, len(x), calls_of(process_set).comm.size)}
    result: tuple[Array, list[int]] = _made("alltoall", rows, tuple, name, process_set, facts)
    return result


def reducescatter(
    arrays: Sequence[Array],
    op: str,
    scales: tuple[float, float] = (1.0, 1.0),
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Return this rank's rows of the reductions of the arrays, by one call; the first ranks may get one row more."""
    before, after = map(float, scales)
    facts = {"op": op, "scales": (before, after)}
    copies = [_scaled(x, before) for x in _with_rows(arrays, "reducescatter")]
    result: list[Array] = _made(
        "reducescatter", copies, lambda reduced: [_scaled(x, after) for x in reduced], name, process_set, facts
    )
    return result


def _made(
    kind: str,
    arrays: Sequence[Array],
    finish: Callable[[Any], Any],
    name: str | None,
    process_set: ProcessSet,
    facts: dict[str, Any] | None = None,
) -> Any:
    """Make a call on arrays, which it may overwrite, and return its result."""
    calls = calls_of(process_set)
    if not arrays:
        raise ArgumentError(f"{kind} takes at least one tensor")
    for x in arrays:
        if x.dtype.kind in "OSUM":
            raise ArgumentError(f"{kind} takes tensors of numbers, not of {x.dtype}")
    signatures = tuple((x.dtype.name, x.shape) for x in arrays)
    request = ReadyCall(kind, named(calls, kind, name), signatures, **(facts or {}))
    return calls.make(StartedCall(request, arrays, finish))


def _with_rows(arrays: Sequence[Array], kind: str) -> list[Array]:
    for x in arrays:
        if x.ndim == 0:
            raise ArgumentError(f"{kind} takes tensors of one or more dimensions, not a scalar")
    return [np.ascontiguousarray(x) for x in arrays]


def _scaled(x: Array, factor: float) -> Array:
    """Return an array, multiplied by a factor. Products of integers are computed as float64, and cut to integers."""
    if factor == 1.0:
        return x
    narrow = x.dtype.kind not in "fc" or x.dtype.itemsize < 4
    wide = x.dtype if not narrow else np.dtype(np.float64 if x.dtype.kind in "iub" else np.float32)
    product: Array = (x.astype(wide) * wide.type(factor)).astype(x.dtype)
    return product
