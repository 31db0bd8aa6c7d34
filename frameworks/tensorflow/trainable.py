"""Gradients of TensorFlow as a reducer takes them: dense tensors, in eager mode or in a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from unisono.frameworks.tensorflow.calls import called


def is_sparse(gradient: Any) -> bool:
    """Return whether a gradient is an ``IndexedSlices``."""
    return isinstance(gradient, tf.IndexedSlices)


def dense(gradient: Any) -> Any:
    """Return a gradient as a tensor, and None for None."""
    return None if gradient is None else tf.convert_to_tensor(gradient)


def run(reduce: Callable[[list[Any]], list[Any]], tensors: Sequence[Any]) -> list[Any]:
    """Return the tensors that `reduce` makes of arrays, and None for None. It may overwrite the arrays.

    The call is made at once in eager mode, and when the graph runs in a graph.
    """
    places = [place for place, tensor in enumerate(tensors) if tensor is not None]

    def listed(values: dict[int, Any]) -> list[Any]:
        return [values.get(place) for place in range(len(tensors))]

    def reduced(*arrays: Any) -> list[Any]:
        # Copies, because TensorFlow may use the memory again.
        results = reduce(listed({place: array.copy() for place, array in zip(places, arrays, strict=True)}))
        return [results[place] for place in places]

    sent = [tensors[place] for place in places]
    return listed(dict(zip(places, called(reduced, sent, [tensor.shape for tensor in sent]), strict=True)))
