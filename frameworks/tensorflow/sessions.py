"""Optimizers, and hooks for sessions of TensorFlow 1, as ``tf.compat.v1.train.MonitoredTrainingSession`` takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from unisono import Communicator
from unisono.frameworks.keras import optimizer as of_keras
from unisono.frameworks.tensorflow.training import Averager, broadcast_variables
from unisono.xla_programs import communicator_or_world


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Copies the global variables of rank `root` to all ranks when a session has been made.

    If rank `root` restores a checkpoint, all ranks get its values.
    """

    def __init__(self, root: int = 0, *, comm: Communicator | None = None) -> None:
        self._root, self._comm = root, comm
        self._copying: Any = None

    def begin(self) -> None:
        """Add the operation to the graph, which can still be changed."""
        variables = tf.compat.v1.global_variables()
        self._copying = broadcast_variables(variables, self._root, comm=communicator_or_world(self._comm))

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Copy the variables of the root to all ranks."""
        session.run(self._copying)


class SessionOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """A wrapper of an optimizer of ``tf.compat.v1.train`` that averages gradients over ranks before it applies them.

    Args:
        optimizer: applies the gradients.
        average: takes the gradients of a step, and returns their averages.
    """

    def __init__(self, optimizer: Any, average: Callable[[Sequence[Any]], list[Any]]) -> None:
        super().__init__(name=f"Distributed{type(optimizer).__name__}", use_locking=False)
        self._wrapped, self._average = optimizer, average

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return the averages over ranks, each with its variable."""
        pairs = self._wrapped.compute_gradients(*args, **kwargs)
        averages = self._average([gradient for gradient, _ in pairs])
        return [(average, variable) for average, (_, variable) in zip(averages, pairs, strict=True)]

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Apply gradients as the wrapped optimizer does."""
        return self._wrapped.apply_gradients(*args, **kwargs)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Return a slot of the wrapped optimizer."""
        return self._wrapped.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Return the names of the slots of the wrapped optimizer."""
        return self._wrapped.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Return the variables of the wrapped optimizer."""
        return self._wrapped.variables(*args, **kwargs)


def DistributedOptimizer(optimizer: Any, comm: Communicator | None = None, **options: Any) -> Any:  # noqa: N802
    """Return an optimizer that averages gradients over ranks before it applies them.

    Args:
        optimizer: an optimizer of ``tf.compat.v1.train``, which is wrapped; or one of Keras, which is changed as by
            `unisono.keras.DistributedOptimizer`.
        comm: the ranks; by default the world that `unisono.init` has made.
        options: further arguments of `GradientReducer`, such as `compression`, except `lag`.

    Raises:
        UsageError: `optimizer` is neither, or averages gradients already; or there is a lag.
    """
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return SessionOptimizer(optimizer, Averager(comm, **options).average)
    return of_keras.DistributedOptimizer(optimizer, comm, **options)
