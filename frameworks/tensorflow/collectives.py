"""The collectives of tensors, with their gradients.

The gradient of a collective is another collective: of a sum a sum, of an allgather a reduce_scatter, of a broadcast a
reduce. So all ranks must compute the gradients of the same calls, in the same order.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from unisono import Communicator, UsageError
from unisono.frameworks.tensorflow.calls import called
from unisono.xla_programs import communicator_or_world

_DIFFERENTIABLE = ("sum", "avg")


def allreduce(x: Any, op: str = "sum", *, comm: Communicator | None = None) -> Any:
    """Return the combination of the tensors of all ranks, element by element, on every rank.

    Args:
        x: a tensor, of the same shape and dtype on all ranks.
        op: the name of the operation. Only "sum" and "avg" have a gradient.
        comm: the communicator; by default the world that `unisono.init` has made.
    """
    world = communicator_or_world(comm)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(x: Any) -> Any:
        def gradient(of_result: Any) -> Any:
            _check_differentiable("allreduce", op)
            return allreduce(of_result, op, comm=world)

        return _one(lambda array: world.allreduce(array, op), x, x.shape), gradient

    return differentiable(tf.convert_to_tensor(x))


def reduce(x: Any, op: str = "sum", root: int = 0, *, comm: Communicator | None = None) -> Any:
    """Return the combination of the tensors of all ranks on rank `root`, and zeros on the other ranks.

    Only "sum" and "avg" have a gradient. The other arguments are those of `allreduce`.
    """
    world = communicator_or_world(comm)

    def reduced(array: Any) -> Any:
        result = world.reduce(array, op, root)
        return 0 * array if result is None else result

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(x: Any) -> Any:
        def gradient(of_result: Any) -> Any:
            _check_differentiable("reduce", op)
            of_sum = broadcast(of_result, root, comm=world)
            return of_sum / world.size if op == "avg" else of_sum

        return _one(reduced, x, x.shape), gradient

    return differentiable(tf.convert_to_tensor(x))


def broadcast(x: Any, root: int = 0, *, comm: Communicator | None = None) -> Any:
    """Return the tensor of rank `root` on every rank. The other ranks pass a tensor of the same shape and dtype."""
    world = communicator_or_world(comm)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(x: Any) -> Any:
        def gradient(of_result: Any) -> Any:
            return reduce(of_result, "sum", root, comm=world)

        return _one(lambda array: world.broadcast(array, root), x, x.shape), gradient

    return differentiable(tf.convert_to_tensor(x))


def allgather(x: Any, *, comm: Communicator | None = None) -> Any:
    """Return the tensors of all ranks, concatenated along the first axis in the order of ranks.

    Args:
        x: a tensor of the same shape and dtype on all ranks; a scalar is a row.
        comm: the communicator; by default the world that `unisono.init` has made.
    """
    world = communicator_or_world(comm)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(x: Any) -> Any:
        def gradient(of_result: Any) -> Any:
            return reduce_scatter(of_result, comm=world)

        rows = None if x.shape.rank is None or x.shape[0] is None else x.shape[0] * world.size
        return _one(world.allgather, x, _with_rows(x.shape, rows)), gradient

    x = tf.convert_to_tensor(x)
    return differentiable(x[None] if x.shape.rank == 0 else x)


def reduce_scatter(x: Any, op: str = "sum", *, comm: Communicator | None = None) -> Any:
    """Return this rank's equal part of the rows of the combination of all tensors.

    The number of rows of `x` must be a multiple of the number of ranks. Only "sum" and "avg" have a gradient.
    """
    world = communicator_or_world(comm)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(x: Any) -> Any:
        def gradient(of_result: Any) -> Any:
            _check_differentiable("reduce_scatter", op)
            of_sum = allgather(of_result, comm=world)
            return of_sum / world.size if op == "avg" else of_sum

        rows = None if x.shape.rank is None or x.shape[0] is None else x.shape[0] // world.size
        return _one(lambda array: world.reduce_scatter(array, op), x, _with_rows(x.shape, rows)), gradient

    return differentiable(_cut(x, world.size))


def alltoall(x: Any, *, comm: Communicator | None = None) -> Any:
    """Return one part of each rank's tensor, in the order of ranks: rank i gets the ith part of the rows of each.

    The number of rows of `x` must be a multiple of the number of ranks.
    """
    world = communicator_or_world(comm)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(x: Any) -> Any:
        def gradient(of_result: Any) -> Any:
            return alltoall(of_result, comm=world)

        return _one(world.alltoall, x, x.shape), gradient

    return differentiable(_cut(x, world.size))


def barrier(*, comm: Communicator | None = None) -> Any:
    """Wait until all ranks are in the barrier. In a graph, return the operation that waits."""
    world = communicator_or_world(comm)

    def wait(token: Any) -> list[Any]:
        world.barrier()
        return [token]

    (token,) = called(wait, [tf.zeros((), tf.uint8)], [()])
    return None if tf.executing_eagerly() else token.op


def _one(call: Any, x: Any, shape: Any) -> Any:
    return called(lambda array: [call(array)], [x], [shape])[0]


def _with_rows(shape: Any, rows: int | None) -> Any:
    return shape if shape.rank is None else tf.TensorShape([rows, *shape[1:]])


def _cut(x: Any, parts: int) -> Any:
    x = tf.convert_to_tensor(x)
    if x.shape.rank == 0 or (x.shape.rank and x.shape[0] is not None and x.shape[0] % parts):
        raise UsageError(f"x has the shape {x.shape}, and its rows cannot be divided equally among {parts} ranks")
    return x


def _check_differentiable(call: str, op: str) -> None:
    if op not in _DIFFERENTIABLE:
        raise UsageError(f"{call} with op={op!r} has no gradient: use one of {', '.join(_DIFFERENTIABLE)}")
