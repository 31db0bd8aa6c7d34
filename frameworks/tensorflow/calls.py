"""Calls of a communicator on tensors: at once in eager mode, and when the graph runs in a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# The attribute of a graph that holds the call that was added to it last.
_LAST_CALL = "_unisono_last_call"


def called(call: Callable[..., Sequence[Any]], inputs: Sequence[Any], shapes: Sequence[Any]) -> list[Any]:
    """Return the tensors that `call` makes of `inputs`. Output i has the dtype of input i.

    Args:
        call: takes arrays of numpy, and returns as many. In a graph, TensorFlow calls it in a thread of its own.
        inputs: the tensors.
        shapes: the shape of each output, as far as it is known before the call.
    """
    if not inputs:
        return []
    if tf.executing_eagerly():
        outputs = call(*(tensor.numpy() for tensor in inputs))
        return [tf.convert_to_tensor(output, tensor.dtype) for output, tensor in zip(outputs, inputs, strict=True)]
    dtypes = [tensor.dtype.as_numpy_dtype for tensor in inputs]

    def run(*arrays: Any) -> list[Any]:
        # A scalar arrives as a number of numpy.
        inputs = [np.asarray(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]
        return [np.asarray(output, dtype) for output, dtype in zip(call(*inputs), dtypes, strict=True)]

    graph = tf.compat.v1.get_default_graph()
    # In a session, a later call must not make the calls before it run: a program chooses what to run.
    before = getattr(graph, _LAST_CALL, None) if graph.building_function else None
    with tf.control_dependencies([] if before is None else [before]):
        tensors = tf.numpy_function(run, inputs, [tensor.dtype for tensor in inputs])
    for tensor, shape in zip(tensors, shapes, strict=True):
        tensor.set_shape(shape)
    setattr(graph, _LAST_CALL, tensors[0].op)
    return list(tensors)
