"""Callbacks for `model.fit` on several ranks, with the names of Horovod. All ranks pass the same ones in one order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from unisono.compat.horovod import arrays, job
from unisono.compat.horovod.errors import ArgumentError
from unisono.compat.horovod.variables import broadcast_values
from unisono.frameworks.keras import callbacks
from unisono.frameworks.keras.trainable import check_outermost, verify_trained


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Copies the weights of the model and the variables of its optimizer from a rank to all others before training.

    After the first epoch, it checks that the trainable variables are still the same on all ranks over which a
    `DistributedOptimizer` averages.

    Args:
        root_rank: the rank whose values are copied.
        device: ignored here.
        local_variables: variables that stay those of each rank.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._local = list(local_variables) if isinstance(local_variables, Iterable) else [local_variables]
        self._is_verified = False

    def register_local_var(self, var: Any) -> None:
        """Let a variable stay that of each rank."""
        self._local.append(var)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Copy the values.

        Raises:
            UsageError: another optimizer stands around the distributed one.
        """
        check_outermost(self.model.optimizer)
        self._is_verified = False
        local = {id(variable) for variable in self._local}
        variables = [*self.model.weights, *self.model.optimizer.variables]
        broadcast_values([each for each in variables if id(each) not in local], self._root_rank)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Check, after the first epoch, that all ranks hold the same trainable variables.

        Raises:
            MismatchError: the trainable variables differ between ranks.
        """
        if not self._is_verified:
            verify_trained(self.model, self._local)
            self._is_verified = True


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Replaces the metrics of an epoch by their means over ranks, for the callbacks behind it and for the history.

    Pass it before callbacks that read metrics, such as `ReduceLROnPlateau`.

    Args:
        device: ignored here.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average the metrics of the epoch."""
        if logs:
            names = sorted(logs)
            (means,) = arrays.allreduce([np.array([float(logs[name]) for name in names])], "avg")
            logs.update(zip(names, means.tolist(), strict=True))


class LearningRateScheduleCallback(callbacks.LearningRateSchedule):
    """Sets the learning rate to ``initial_lr * multiplier(epoch)``.

    Args:
        initial_lr: the learning rate that is multiplied.
        multiplier: a function of the epoch, or a number, which is raised to the number of epochs since `start_epoch`.
        start_epoch: the first epoch in which the rate is set.
        end_epoch: the epoch after the last; None for no end.
        staircase: whether the rate is set once in an epoch. Otherwise it is set before each batch.
        momentum_correction: whether the momentum of a batch is multiplied by the change of the rate.
        steps_per_epoch: the batches of an epoch; needed where Keras does not know them.
    """

    logged_as = "lr"

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__(
            initial_lr,
            multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch),
            start_epoch,
            end_epoch,
            staircase=staircase,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )


class LearningRateWarmupCallback(callbacks.LearningRateWarmup):
    """Raises the learning rate from that of one process to that of all ranks, batch by batch.

    Args:
        initial_lr: the learning rate after the warmup; mostly that of one process, times the number of ranks.
        warmup_epochs: the epochs in which it rises from ``initial_lr / size``.
        momentum_correction: whether the momentum of a batch is multiplied by the change of the rate.
        steps_per_epoch: the batches of an epoch; needed where Keras does not know them.
        verbose: 1 to print the rate on rank 0 when the warmup has ended.
    """

    logged_as = "lr"

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            initial_lr,
            warmup_epochs,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
            verbose=verbose,
            comm=job.running().world,
        )


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Writes the model on rank 0 when a metric is better than before. Set its attribute `filepath` before training.

    Args:
        monitor: the metric.
        verbose: 1 to print a line for each file.
        save_weights_only: whether only weights are written.
        mode: "min", "max" or "auto".
        save_freq: "epoch", or after how many batches.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        options = {"monitor": monitor, "verbose": verbose, "mode": mode, "save_freq": save_freq}
        # Keras checks the name, which the program sets later.
        name = "best.weights.h5" if save_weights_only else "best.keras"
        super().__init__(name, save_best_only=True, save_weights_only=save_weights_only, **options)
        self.filepath: Any = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check that there is a path; raises `ArgumentError`."""
        if self.filepath is None:
            raise ArgumentError("BestModelCheckpoint has no path: set its attribute filepath before fit")
        super().on_train_begin(logs)

    def _save_model(self, *arguments: Any, **options: Any) -> None:
        if job.rank() == 0:
            super()._save_model(*arguments, **options)
