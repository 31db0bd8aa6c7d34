"""The calls on values of any backend: tensors, arrays and numbers. Gradients do not flow through them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from unisono.compat.horovod import arrays
from unisono.compat.horovod.arguments import Average, op_of, scatter_op
from unisono.compat.horovod.compression import NoneCompressor
from unisono.compat.horovod.errors import ArgumentError
from unisono.compat.horovod.variables import broadcast_values
from unisono.frameworks.arrays import Array


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = NoneCompressor,
) -> Any:
    """Return the reduction of a value over all ranks, as a tensor of the backend.

    Args:
        value: a value of the same shape and dtype on all ranks.
        name: the name by which ranks match the call.
        average: an old form of `op`: True for Average, False for Sum.
        prescale_factor: the value is multiplied by it before the reduction.
        postscale_factor: the result is multiplied by it.
        op: Average (the default), Sum, Min, Max, Product or Adasum.
        compression: the form in which the value travels.
    """
    compressed, context = compression.compress(keras.ops.convert_to_tensor(value))
    factors = prescale_factor, postscale_factor
    (reduced,) = arrays.allreduce([_array(compressed)], op_of(op, average), factors, name)
    return compression.decompress(keras.ops.convert_to_tensor(reduced), context)


def allgather(value: Any, name: str | None = None) -> Any:
    """Return the rows of all ranks, in the order of ranks. Ranks may have different numbers of rows."""
    return keras.ops.convert_to_tensor(arrays.allgather([_array(value)], name)[0])


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the value of the rank `root_rank`, as a tensor of the backend."""
    return keras.ops.convert_to_tensor(arrays.broadcast([_array(value)], root_rank, name)[0])


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Return this rank's rows of the reduction of a value over all ranks; `op` is Average or Sum."""
    return keras.ops.convert_to_tensor(arrays.reducescatter([_array(value)], scatter_op(op), name=name)[0])


def broadcast_global_variables(root_rank: int) -> None:
    """Raise `ArgumentError`: Keras 3 has no global variables."""
    raise ArgumentError("Keras 3 has no global variables: use BroadcastGlobalVariablesCallback(root_rank)")


def broadcast_variables(variables: Any, root_rank: int) -> None:
    """Overwrite variables of Keras with those of the rank `root_rank`, by one call."""
    broadcast_values(list(variables), root_rank)


def _array(value: Any) -> Array:
    return np.asarray(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(value)))
