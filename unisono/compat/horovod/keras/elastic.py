"""Elastic training with Keras: `run`, `KerasState` and callbacks that keep a state up to date during `fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from unisono.compat.horovod import elastic
from unisono.compat.horovod.elastic import ObjectState, Result, State
from unisono.compat.horovod.variables import ModelState as KerasState

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


def run(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a function ``train(state, …)`` so that it is called again after each change of the ranks.

    The rest is as in `unisono.compat.horovod.torch.elastic.run`. On the backend JAX, compile the model again first.
    """
    if keras.backend.backend() == "tensorflow":
        from unisono.compat.horovod.tensorflow.elastic import run as run_with_graphs

        return run_with_graphs(function)
    return elastic.run(function)


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commits a state every few batches, and at the end of each epoch.

    Args:
        state: the state.
        batches_per_commit: how many batches there are between two commits.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self._state, self._batches_per_commit = state, batches_per_commit
        self._remaining = batches_per_commit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin to count, so that all ranks commit after the same batch."""
        self._remaining = self._batches_per_commit

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Commit after every few batches."""
        self._remaining -= 1
        if self._remaining == 0:
            self._state.commit()
            self._remaining = self._batches_per_commit

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Commit."""
        self._state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets `state.batch` to the number of the batch, and to 0 at the end of an epoch.

    Args:
        state: the state, with an attribute `batch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Note the number of the batch."""
        self._state.batch = batch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin to count anew."""
        self._state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets `state.epoch` to the number of epochs that have ended, those before a change of the ranks included.

    Args:
        state: the state, with an attribute `epoch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state, self._first = state, state.epoch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Note the epoch with which this call of `fit` begins, which Keras numbers 0."""
        self._first = self._state.epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Count the epoch."""
        self._state.epoch = self._first + epoch + 1
