"""The calls on tensors: each form of allreduce, allgather, broadcast, alltoall and reducescatter.

A call with "_async" returns a handle for `poll` and `synchronize`. One with "_" at its end overwrites its tensors.
Gradients flow through the others; see `gradients`.

All of them match by name: ranks may make them in any order, and each name must be used by all ranks of the process set.
Calls without a name match in the order in which ranks make them. They raise these errors:

- `ArgumentError`, `UsageError`: an argument is wrong, or `init` has not been called. Nothing has been sent.
- `DuplicateNameError`: the name is in use by a call of this rank that has not ended. Nothing has been sent.
- `NameMismatchError`: ranks passed different shapes, dtypes, ops or roots under the name. Later calls work.
- `StalledError`: some ranks have not used the name in time. Later calls work.
- `HorovodInternalError`: the call failed; its cause is the error of Unisono, such as a `PeerLostError`.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from unisono.compat.horovod import adasum
from unisono.compat.horovod.arguments import DIFFERENTIABLE, Average, named, op_of, root_of, rows_to_ranks, scatter_op
from unisono.compat.horovod.entries import StartedCall
from unisono.compat.horovod.errors import ArgumentError
from unisono.compat.horovod.job import calls_of
from unisono.compat.horovod.negotiation import Negotiator
from unisono.compat.horovod.process_sets import ProcessSet, global_process_set
from unisono.compat.horovod.requests import ReadyCall
from unisono.compat.horovod.torch.staging import Buffer, array_of, check, read_only, request, scale, tensor_of
from unisono.frameworks.torch.calls.sparse import coordinates_of, flat_indices


class _Handle(NamedTuple):
    calls: Negotiator
    entry: StartedCall


_handles: dict[int, _Handle] = {}
_numbers = itertools.count()
_lock = threading.Lock()  # of the handles


def poll(handle: int) -> bool:
    """Return whether the call of a handle has ended, so that `synchronize` will not wait."""
    entry = _handles.get(handle)
    return entry is None or entry.entry.done()


def synchronize(handle: int | Callable[[], Any]) -> Any:
    """Wait for the call of a handle, and return its result. A second call with the handle returns None."""
    if callable(handle):
        return handle()
    with _lock:
        started = _handles.pop(handle, None)
    if started is None:
        return None
    try:
        return started.entry.wait()
    finally:
        started.calls.forget(started.entry)


def _start(calls: Negotiator, asked: ReadyCall, arrays: Sequence[Any], finish: Callable[[Any], Any]) -> int:
    """Start a call, and return its handle."""
    entry = calls.submit(StartedCall(asked, arrays, finish))
    with _lock:
        handle = next(_numbers)
        _handles[handle] = _Handle(calls, entry)
    return handle


def forget_all() -> None:
    """Forget all handles, because the job has ended."""
    with _lock:
        _handles.clear()


# --- allreduce ------------------------------------------------------------------------------------------------------


def _reduce(
    tensors: Sequence[Any],
    name: str | None,
    op: str,
    scales: tuple[float, float],
    process_set: ProcessSet,
    *,
    in_place: bool,
    is_list: bool,
) -> int:
    calls = calls_of(process_set)
    _check_all(tensors, "allreduce")
    if op == "adasum":
        adasum.check_size(calls.comm.size)
    buffers = [Buffer(tensor, in_place=in_place) for tensor in tensors]
    before, after = map(float, scales)

    def finish(_: Any) -> Any:
        for buffer in buffers:
            scale(buffer.memory, after)
        results = [buffer.result() for buffer in buffers]
        return results if is_list else results[0]

    asked = request("allreduce", named(calls, "allreduce", name), tensors, op=op, scales=(before, after))
    for buffer in buffers:
        scale(buffer.memory, before)
    return _start(calls, asked, [buffer.array for buffer in buffers], finish)


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `allreduce`, which autograd does not follow, and return a handle; `synchronize` returns a new tensor."""
    scales = prescale_factor, postscale_factor
    return _reduce([tensor], name, op_of(op, average), scales, process_set, in_place=False, is_list=False)


def allreduce_async_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `allreduce_`, and return a handle."""
    scales = prescale_factor, postscale_factor
    return _reduce([tensor], name, op_of(op, average), scales, process_set, in_place=True, is_list=False)


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Overwrite a tensor with the reduction over all ranks, and return it."""
    return synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set))


def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `grouped_allreduce`, which autograd does not follow, and return a handle; `synchronize` returns a list."""
    scales = prescale_factor, postscale_factor
    return _reduce(list(tensors), name, op_of(op, average), scales, process_set, in_place=False, is_list=True)


def grouped_allreduce_async_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `grouped_allreduce_`, and return a handle."""
    scales = prescale_factor, postscale_factor
    return _reduce(list(tensors), name, op_of(op, average), scales, process_set, in_place=True, is_list=True)


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Overwrite the tensors of a list with their reductions over all ranks, by one call."""
    factors = prescale_factor, postscale_factor
    return synchronize(grouped_allreduce_async_(tensors, average, name, op, *factors, process_set))


def sparse_allreduce_async(
    tensor: Any, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Any]:
    """Start the sum or average of sparse tensors; return a function that waits for it and returns a sparse tensor.

    Elements at the same place are added up on the way, so each place occurs once in the result.
    """
    chosen = op_of(op)
    if chosen not in DIFFERENTIABLE:
        raise ArgumentError(f"sparse tensors can be averaged and summed, and not by {chosen}")
    if not isinstance(tensor, torch.Tensor) or not tensor.is_sparse:
        raise ArgumentError("sparse_allreduce_async takes a sparse tensor: use allreduce_async for others")
    calls, own = calls_of(process_set), tensor.detach().coalesce()
    dimensions = own.sparse_dim()
    shape = tuple(own.shape[:dimensions])
    coordinates, memory = read_only(own.indices()), read_only(own.values())
    places = flat_indices(array_of(coordinates), shape)

    def finish(total: Any) -> Any:
        indices, rows = total
        values = tensor_of(rows, memory).to(own.device)
        if chosen == "avg":
            values = values / calls.comm.size
        places = torch.from_numpy(coordinates_of(indices, shape)).to(own.device)
        return torch.sparse_coo_tensor(places, values, own.shape, is_coalesced=True, check_invariants=False)

    start = partial(calls.sparse_sums.start, places, array_of(memory), math.prod(shape), wait=False)
    asked = request("sparse_allreduce", named(calls, "sparse_allreduce", name), [own], op=chosen, splits=(dimensions,))
    # The handles of other calls are forgotten by their tensors, so this handle is kept by the function.
    return partial(synchronize, _start(calls, asked, [start], finish))


# --- allgather ------------------------------------------------------------------------------------------------------


def _gather(tensors: Sequence[Any], name: str | None, process_set: ProcessSet, *, is_list: bool) -> int:
    calls = calls_of(process_set)
    _check_all(tensors, "allgather", has_rows=True)
    memories = [read_only(tensor) for tensor in tensors]

    def finish(gathered: Sequence[Any]) -> Any:
        memories.clear()
        results = [tensor_of(array, tensor) for array, tensor in zip(gathered, tensors, strict=True)]
        return results if is_list else results[0]

    asked = request("allgather", named(calls, "allgather", name), tensors)
    return _start(calls, asked, [array_of(memory) for memory in memories], finish)


def allgather_async(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start `allgather`, which autograd does not follow, and return a handle."""
    return _gather([tensor], name, process_set, is_list=False)


def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start `grouped_allgather`, which autograd does not follow, and return a handle."""
    return _gather(list(tensors), name, process_set, is_list=True)


# --- broadcast ------------------------------------------------------------------------------------------------------


def _copy(tensor: Any, root_rank: int, name: str | None, process_set: ProcessSet, *, in_place: bool) -> int:
    calls = calls_of(process_set)
    _check_all([tensor], "broadcast")
    buffer = Buffer(tensor, in_place=in_place)
    root = root_of(root_rank, process_set)
    asked = request("broadcast", named(calls, "broadcast", name), [tensor], root=root)
    return _start(calls, asked, [buffer.array], lambda _: buffer.result())


def broadcast_async(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start `broadcast`, which autograd does not follow, and return a handle."""
    return _copy(tensor, root_rank, name, process_set, in_place=False)


def broadcast_async_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start `broadcast_`, and return a handle."""
    return _copy(tensor, root_rank, name, process_set, in_place=True)


def broadcast_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Overwrite a tensor with that of the rank `root_rank` of the job, and return it."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


# --- alltoall and reducescatter -------------------------------------------------------------------------------------


def alltoall_async(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start `alltoall`, which autograd does not follow, and return a handle.

    `synchronize` returns the rows and their numbers.
    """
    calls = calls_of(process_set)
    _check_all([tensor], "alltoall", has_rows=True)
    listed = () if splits is None else splits.tolist() if isinstance(splits, torch.Tensor) else splits
    rows = rows_to_ranks(listed, tensor.shape[0], calls.comm.size)
    memory = read_only(tensor)
    like = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32)

    def finish(result: Any) -> Any:
        received, counts = result
        return tensor_of(received, memory).to(tensor.device), torch.tensor(counts, dtype=like.dtype, device=like.device)

    asked = request("alltoall", named(calls, "alltoall", name), [tensor], splits=rows)
    return _start(calls, asked, [array_of(memory)], finish)


def _scatter(
    tensors: Sequence[Any],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    scales: tuple[float, float],
    *,
    is_list: bool,
) -> int:
    calls = calls_of(process_set)
    _check_all(tensors, "reducescatter", has_rows=True)
    chosen = scatter_op(op)
    before, after = map(float, scales)
    buffers = [Buffer(tensor, in_place=False) for tensor in tensors]
    for buffer in buffers:
        scale(buffer.memory, before)

    def finish(shares: Sequence[Any]) -> Any:
        results = [tensor_of(share, buffer.memory) for share, buffer in zip(shares, buffers, strict=True)]
        for result in results:
            scale(result, after)
        results = [result.to(tensor.device) for result, tensor in zip(results, tensors, strict=True)]
        return results if is_list else results[0]

    asked = request("reducescatter", named(calls, "reducescatter", name), tensors, op=chosen, scales=(before, after))
    return _start(calls, asked, [buffer.array for buffer in buffers], finish)


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start `reducescatter`, which autograd does not follow, and return a handle."""
    return _scatter([tensor], name, op, process_set, (prescale_factor, postscale_factor), is_list=False)


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start `grouped_reducescatter`, which autograd does not follow, and return a handle."""
    return _scatter(list(tensors), name, op, process_set, (prescale_factor, postscale_factor), is_list=True)


def _check_all(tensors: Sequence[Any], call: str, *, has_rows: bool = False) -> None:
    if not tensors:
        raise ArgumentError(f"{call} takes at least one tensor")
    for tensor in tensors:
        check(tensor, call)
        if has_rows and tensor.dim() == 0:
            raise ArgumentError(f"{call} takes tensors of one or more dimensions, not a scalar: pass tensor.reshape(1)")
