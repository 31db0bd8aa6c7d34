"""The average of the gradients of a step over ranks, on each backend of Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras

from unisono import Communicator, GradientReducer, UsageError

# Takes the gradients of a step, and returns their averages. A gradient is None where a variable has none.
Average: TypeAlias = Callable[[Sequence[Any]], "list[Any]"]


def average_for(comm: Communicator, options: dict[str, Any]) -> Average:
    """Return the function that averages gradients on the backend of this process.

    Args:
        comm: the ranks.
        options: further arguments of `GradientReducer`.

    Raises:
        UsageError: Unisono has none for this backend, or the backend takes no options.
    """
    backend = keras.backend.backend()
    if backend not in _BY_BACKEND:
        raise UsageError(
            f"Keras uses the backend {backend!r}, on which gradients are not averaged: set KERAS_BACKEND to one of "
            f"{', '.join(_BY_BACKEND)}"
        )
    return _BY_BACKEND[backend](comm, options)


def _on_torch(comm: Communicator, options: dict[str, Any]) -> Average:
    reducer = GradientReducer(comm, **options)

    def average(gradients: Sequence[Any]) -> list[Any]:
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                reducer.ready(f"gradient {number}", gradient)
        averages = reducer.finish()
        return [averages.get(f"gradient {number}") for number in range(len(gradients))]

    return average


def _on_tensorflow(comm: Communicator, options: dict[str, Any]) -> Average:
    from unisono.frameworks.tensorflow.training import Averager

    return Averager(comm, **options).average


def _on_jax(comm: Communicator, options: dict[str, Any]) -> Average:
    if options:
        raise UsageError(
            f"on the backend 'jax' gradients are averaged inside the compiled step, which takes no {', '.join(options)}"
        )
    from unisono.frameworks.jax.collectives import allreduce

    def average(gradients: Sequence[Any]) -> list[Any]:
        return [None if gradient is None else allreduce(gradient, "avg", comm=comm) for gradient in gradients]

    return average


_BY_BACKEND: dict[str, Callable[[Communicator, dict[str, Any]], Average]] = {
    "torch": _on_torch,
    "tensorflow": _on_tensorflow,
    "jax": _on_jax,
}
