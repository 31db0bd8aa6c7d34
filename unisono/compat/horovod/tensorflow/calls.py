"""The calls on tensors, in eager mode and in graphs. Gradients flow through them.

All of them match by name, as those of torch do: ranks may make them in any order. A call without a name has in a graph
the name of its tensor, as in Horovod. In eager mode it matches by its place among the calls of its kind. In a graph the
call is made when the graph runs, and its error becomes an error of TensorFlow whose text begins with the name of the
class.

The arguments `device_dense`, `device_sparse` and `ignore_name_scope` are those of Horovod, and without effect here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from unisono.compat.horovod import arrays, job
from unisono.compat.horovod.arguments import Average, Sum, check_differentiable, op_of, scatter_op
from unisono.compat.horovod.errors import ArgumentError
from unisono.compat.horovod.process_sets import ProcessSet, global_process_set
from unisono.compat.horovod.tensorflow.compression import Compression
from unisono.frameworks.tensorflow.calls import called


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Return the reductions of the tensors of a list over all ranks, by one call; see `allreduce`."""
    chosen = op_of(op, average)
    scales = float(prescale_factor), float(postscale_factor)
    result = list(tensors)
    dense = [place for place, x in enumerate(result) if not isinstance(x, tf.IndexedSlices)]
    for place, x in enumerate(result):
        if place not in dense:
            result[place] = _gathered_slices(
                x, chosen, scales, None if name is None else f"{name}.{place}", process_set
            )
    if dense:
        compressed, contexts = zip(
            *(compression.compress(tf.convert_to_tensor(result[place])) for place in dense), strict=True
        )
        reduced = _allreduce(compressed, chosen, scales, name, process_set)
        for place, x, context in zip(dense, reduced, contexts, strict=True):
            result[place] = compression.decompress(x, context)
    return result


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Return the reduction of a tensor over all ranks.

    Args:
        tensor: a tensor or variable of the same shape and dtype on all ranks. An ``IndexedSlices`` becomes one with the
            values and indices of all ranks, and has no gradient.
        average: an old form of `op`: True for Average, False for Sum.
        device_dense: ignored here.
        device_sparse: ignored here.
        compression: the form in which the tensor travels, such as ``Compression.fp16``.
        op: Average (the default), Sum, Min, Max, Product or Adasum. An average of integers is cut towards zero. Only
            Average and Sum have a gradient.
        prescale_factor: the tensor is multiplied by it before the reduction.
        postscale_factor: the result is multiplied by it.
        name: the name by which ranks match the call.
        process_set: the ranks that take part.
        ignore_name_scope: ignored here, because names have no scope.
    """
    factors = prescale_factor, postscale_factor
    group = grouped_allreduce([tensor], average, "", "", compression, op, *factors, process_set, name=name)
    return group[0]


def _allreduce(
    tensors: Sequence[Any], op: str, scales: tuple[float, float], name: str | None, process_set: ProcessSet
) -> list[Any]:
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*tensors: Any) -> Any:
        def gradient(*of_results: Any) -> Any:
            check_differentiable(op)
            return _allreduce(of_results, op, scales, None, process_set)

        full = _name("Allreduce", tensors, name)
        shapes = [x.shape for x in tensors]
        return called(lambda *x: arrays.allreduce(x, op, scales, full, process_set), tensors, shapes), gradient

    return _list(differentiable, tensors)


def _gathered_slices(x: Any, op: str, scales: tuple[float, float], name: str | None, process_set: ProcessSet) -> Any:
    """Return an ``IndexedSlices`` with the values and indices of all ranks."""
    check_differentiable(op)
    if scales != (1.0, 1.0):
        raise ArgumentError(
            "prescale_factor and postscale_factor are for dense tensors: convert the IndexedSlices first"
        )

    def gather(values: Any, indices: Any) -> list[Any]:
        gathered = arrays.allgather([values, indices], full, process_set)
        if op == "avg":
            gathered[0] = (gathered[0] / job_size(process_set)).astype(values.dtype)
        return gathered

    full = _name("Allreduce", [x.values], name)
    shapes = [_without_rows(x.values), _without_rows(x.indices)]
    values, indices = called(gather, [x.values, x.indices], shapes)
    return tf.IndexedSlices(values, indices, dense_shape=x.dense_shape)


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return for each tensor of a list the rows of all ranks, by one call; see `allgather`."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*tensors: Any) -> Any:
        def gradient(*of_results: Any) -> Any:
            averages = _allreduce(of_results, "avg", (1.0, 1.0), None, process_set)
            rows = tf.stack([tf.shape(x)[0] for x in tensors])[None]
            begins = tf.reduce_sum(allgather(rows, process_set=process_set)[: _own_rank(process_set)], 0)
            return [average[begins[place] : begins[place] + rows[0, place]] for place, average in enumerate(averages)]

        full = _name("Allgather", tensors, name)
        shapes = [_without_rows(x) for x in tensors]
        return called(lambda *x: arrays.allgather(x, full, process_set), tensors, shapes), gradient

    return _list(differentiable, tensors)


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the rows of all ranks, in the order of ranks. Ranks may have different numbers of rows."""
    return grouped_allgather([tensor], name, process_set=process_set)[0]


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the tensor of the rank `root_rank` of the job. All ranks pass a tensor of that shape and dtype."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(tensor: Any) -> Any:
        def gradient(of_result: Any) -> Any:
            (average,) = _allreduce([of_result], "avg", (1.0, 1.0), None, process_set)
            return average * tf.cast(rank_op() == root_rank, average.dtype)

        return broadcast_all([tensor], root_rank, name, process_set)[0], gradient

    return differentiable(tf.convert_to_tensor(tensor))


def broadcast_all(tensors: Sequence[Any], root_rank: int, name: str | None, process_set: ProcessSet) -> list[Any]:
    """Return the tensors of the rank `root_rank`, by one call, without gradients."""
    full = _name("Broadcast", tensors, name)
    shapes = [x.shape for x in tensors]
    return called(lambda *x: arrays.broadcast(x, root_rank, full, process_set), tensors, shapes)


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send each rank some rows, and return the rows that this rank receives, in the order of ranks.

    Args:
        tensor: a tensor with the same dtype and row shape on all ranks.
        splits: how many rows each rank gets, as a list or a tensor of integers; by default equal parts.
        name: the name by which ranks match the call.
        ignore_name_scope: ignored here.
        process_set: the ranks that take part.

    Returns:
        The received rows. With `splits`, also a tensor of int32 with the number of rows from each rank.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(tensor: Any, splits: Any) -> Any:
        def exchange(x: Any, rows: Any) -> list[Any]:
            received, counts = arrays.alltoall(x, rows.tolist(), full, process_set)
            return [received, np.asarray(counts, rows.dtype)]

        def gradient(of_received: Any, _: Any) -> Any:
            returned, _ = alltoall(of_received, counts, process_set=process_set)
            return returned, None

        full = _name("Alltoall", [tensor], name)
        received, counts = called(exchange, [tensor, splits], [_without_rows(tensor), [None]])
        return (received, counts), gradient

    rows = tf.constant([], tf.int32) if splits is None else tf.cast(tf.convert_to_tensor(splits), tf.int32)
    received, counts = differentiable(tf.convert_to_tensor(tensor), rows)
    return received if splits is None else (received, counts)


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Any]:
    """Return this rank's rows of the reductions of the tensors of a list, by one call; see `reducescatter`."""
    chosen = scatter_op(op)
    scales = float(prescale_factor), float(postscale_factor)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*tensors: Any) -> Any:
        def gradient(*of_results: Any) -> Any:
            ranks = _number(lambda: job_size(process_set) if op == Sum else 1)
            factors = [tf.cast(scales[0] * scales[1] * tf.cast(ranks, tf.float64), x.dtype) for x in of_results]
            scaled = [x * factor for x, factor in zip(of_results, factors, strict=True)]
            return grouped_allgather(scaled, process_set=process_set)

        full = _name("Reducescatter", tensors, name)
        shapes = [_without_rows(x) for x in tensors]
        return called(lambda *x: arrays.reducescatter(x, chosen, scales, full, process_set), tensors, shapes), gradient

    compressed, contexts = zip(*(compression.compress(tf.convert_to_tensor(x)) for x in tensors), strict=True)
    reduced = _list(differentiable, compressed)
    return [compression.decompress(x, context) for x, context in zip(reduced, contexts, strict=True)]


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor over all ranks, and return this rank's rows of the result.

    If the rows cannot be divided evenly, the first ranks get one more. The arguments are those of `allreduce`; `op` is
    Average or Sum.
    """
    scales = prescale_factor, postscale_factor
    return grouped_reducescatter([tensor], device_dense, compression, op, process_set, *scales, name=name)[0]


def job_size(process_set: ProcessSet) -> int:
    """Return the number of ranks in a process set on which calls can be made."""
    return job.calls_of(process_set).comm.size


# --- ranks in a graph -------------------------------------------------------------------------------------------------


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return a tensor with the number of ranks in a process set when the graph runs."""
    return _number(lambda: job.running().process_set(process_set_id).size() or 0)


def rank_op(name: str | None = None) -> Any:
    """Return a tensor with the rank of this process when the graph runs."""
    return _number(job.rank)


def local_size_op(name: str | None = None) -> Any:
    """Return a tensor with the number of ranks on this host when the graph runs."""
    return _number(job.local_size)


def local_rank_op(name: str | None = None) -> Any:
    """Return a tensor with the index of this rank among the ranks of its host when the graph runs."""
    return _number(job.local_rank)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return a tensor that is 1 if this rank is in the process set when the graph runs, and 0 otherwise."""
    return _number(lambda: int(bool(job.running().process_set(process_set_id).included())))


def _own_rank(process_set: ProcessSet) -> Any:
    return _number(lambda: job.calls_of(process_set).comm.rank)


def _number(function: Callable[[], int]) -> Any:
    return called(lambda _: [np.asarray(function(), np.int32)], [tf.zeros((), tf.int32)], [()])[0]


# --- tensors ----------------------------------------------------------------------------------------------------------


def _list(differentiable: Callable[..., Any], tensors: Sequence[Any]) -> list[Any]:
    if not tensors:
        raise ArgumentError("a grouped call takes at least one tensor")
    result = differentiable(*map(tf.convert_to_tensor, tensors))
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _without_rows(x: Any) -> Any:
    return tf.TensorShape(None) if x.shape.rank is None else tf.TensorShape([None, *x.shape[1:]])


def _name(call: str, tensors: Sequence[Any], name: str | None) -> str | None:
    """Return the name of a call. In a graph without one it is made of the names of the graph and of the tensors."""
    job.running()
    if name is not None and not isinstance(name, str):
        raise ArgumentError(f"name must be a string or None, not {name!r}")
    if name is not None or tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    ends = "_".join(dict.fromkeys((tensors[0].name, tensors[-1].name)))
    return "/".join([*_path(graph), graph.unique_name(f"Horovod{call}_{re.sub('[^a-zA-Z0-9_]', '_', ends)}")])


def _path(graph: Any) -> list[str]:
    """Return the names of functions around a call, without the numbers of a process that TensorFlow adds to some."""
    names: list[str] = []
    while getattr(graph, "building_function", False):
        names.insert(0, re.sub(r"_\d+$", "", str(graph.name)))
        graph = graph.outer_graph
    return names
