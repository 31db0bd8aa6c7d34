"""The calls through which gradients flow.

The backward of an allreduce is the same allreduce of the gradients. That of an allgather or a broadcast averages the
gradients over ranks, as Horovod does. All ranks must compute these gradients in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unisono.compat.horovod import job
from unisono.compat.horovod.arguments import Average, Sum, check_differentiable, op_of
from unisono.compat.horovod.errors import ArgumentError
from unisono.compat.horovod.process_sets import ProcessSet, global_process_set
from unisono.compat.horovod.torch import calls
from unisono.compat.horovod.torch.calls import synchronize
from unisono.compat.horovod.torch.compression import Compression


class _Allreduce(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, arguments: dict[str, Any], *tensors: Any) -> Any:
        ctx.arguments = {key: value for key, value in arguments.items() if key != "name"}
        return tuple(synchronize(calls.grouped_allreduce_async(tensors, **arguments)))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        check_differentiable(op_of(ctx.arguments["op"], ctx.arguments["average"]))
        return None, *synchronize(calls.grouped_allreduce_async(gradients, **ctx.arguments))


class _Allgather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Any) -> Any:
        gathered = tuple(synchronize(calls.grouped_allgather_async(tensors, name, process_set)))
        ctx.rows, ctx.process_set = [len(tensor) for tensor in tensors], process_set
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        averages = synchronize(calls.grouped_allreduce_async(gradients, op=Average, process_set=ctx.process_set))
        rows_of_ranks = synchronize(calls.allgather_async(torch.tensor([ctx.rows]), process_set=ctx.process_set))
        begins = rows_of_ranks[: ctx.process_set.rank()].sum(0).tolist()
        parts = zip(averages, begins, ctx.rows, strict=True)
        return None, None, *(average.narrow(0, begin, rows) for average, begin, rows in parts)


class _Broadcast(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(calls.broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        average = synchronize(calls.allreduce_async(gradient, op=Average, process_set=ctx.process_set))
        return average if job.rank() == ctx.root_rank else torch.zeros_like(average), None, None, None


class _Alltoall(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Any, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        received, counts = synchronize(calls.alltoall_async(tensor, splits, name, process_set))
        ctx.counts, ctx.process_set = counts, process_set
        ctx.mark_non_differentiable(counts)
        return received, counts

    @staticmethod
    def backward(ctx: Any, gradient: Any, _: Any) -> Any:
        returned, _ = synchronize(calls.alltoall_async(gradient, ctx.counts, None, ctx.process_set))
        return returned, None, None, None


class _Reducescatter(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, arguments: dict[str, Any], *tensors: Any) -> Any:
        ctx.arguments = arguments
        return tuple(synchronize(calls.grouped_reducescatter_async(tensors, **arguments)))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        process_set = ctx.arguments["process_set"]
        factor = ctx.arguments["prescale_factor"] * ctx.arguments["postscale_factor"]
        factor *= process_set.size() if ctx.arguments["op"] == Sum else 1
        scaled = [gradient * factor for gradient in gradients]
        return None, *synchronize(calls.grouped_allgather_async(scaled, None, process_set))


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the reductions of the tensors of a list over all ranks, by one call; see `allreduce`."""
    if not tensors:
        raise ArgumentError("grouped_allreduce takes at least one tensor")
    arguments = {
        "average": average,
        "name": name,
        "op": op,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "process_set": process_set,
    }
    compressed, contexts = zip(*map(compression.compress, tensors), strict=True)
    reduced = _Allreduce.apply(arguments, *compressed)
    return [compression.decompress(x, context) for x, context in zip(reduced, contexts, strict=True)]


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the reduction of a tensor over all ranks.

    Args:
        tensor: a tensor of the same shape and dtype on all ranks.
        average: an old form of `op`: True for Average, False for Sum.
        name: the name by which ranks match the call.
        compression: the form in which the tensor travels, such as ``Compression.fp16``.
        op: Average (the default), Sum, Min, Max, Product or Adasum. An average of integers is cut towards zero.
        prescale_factor: the tensor is multiplied by it before the reduction.
        postscale_factor: the result is multiplied by it.
        process_set: the ranks that take part.
    """
    arguments = average, name, compression, op, prescale_factor, postscale_factor, process_set
    return grouped_allreduce([tensor], *arguments)[0]


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Return the rows of all ranks, in the order of ranks. Ranks may have different numbers of rows."""
    return _Allgather.apply(name, process_set, tensor)[0]


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return for each tensor of a list the rows of all ranks, by one call; see `allgather`."""
    return list(_Allgather.apply(name, process_set, *tensors))


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the tensor of the rank `root_rank` of the job. All ranks pass a tensor of that shape and dtype."""
    return _Broadcast.apply(tensor, root_rank, name, process_set)


def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send each rank some rows, and return the rows that this rank receives, in the order of ranks.

    Args:
        tensor: a tensor with the same dtype and row shape on all ranks.
        splits: how many rows each rank gets, as a list or a tensor of integers; by default equal parts.
        name: the name by which ranks match the call.
        process_set: the ranks that take part.

    Returns:
        The received rows. With `splits`, also a tensor with the number of rows from each rank.
    """
    received, counts = _Alltoall.apply(tensor, splits, name, process_set)
    return received if splits is None else (received, counts)


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Return this rank's rows of the reductions of the tensors of a list, by one call; see `reducescatter`."""
    if not tensors:
        raise ArgumentError("grouped_reducescatter takes at least one tensor")
    arguments = {
        "name": name,
        "op": op,
        "process_set": process_set,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
    }
    compressed, contexts = zip(*map(compression.compress, tensors), strict=True)
    reduced = _Reducescatter.apply(arguments, *compressed)
    return [compression.decompress(x, context) for x, context in zip(reduced, contexts, strict=True)]


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor over all ranks, and return this rank's rows of the result.

    If the rows cannot be divided evenly, the first ranks get one more. The arguments are those of `allreduce`; `op` is
    Average or Sum.
    """
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]
