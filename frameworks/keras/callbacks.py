"""Callbacks for `model.fit` on several ranks. All ranks pass the same callbacks in the same order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import keras

from unisono import Communicator, UsageError
from unisono.data_parallel import average_metrics, broadcast_parameters
from unisono.frameworks.keras.trainable import check_outermost, verify_trained
from unisono.xla_programs import communicator_or_world


class BroadcastVariables(keras.callbacks.Callback):  # type: ignore[misc]
    """Copies the weights of the model and the variables of its optimizer from a rank to all others before training.

    The states of random generators stay as they are, so that ranks drop different units. Seed ranks differently for
    that, as by ``keras.utils.set_random_seed(seed + rank)``.

    After the first epoch, it checks that the trainable variables are still the same on all ranks over which a
    `DistributedOptimizer` averages.

    Args:
        root: the rank whose values are copied.
        comm: the ranks; by default the world that `unisono.init` has made.
    """

    def __init__(self, root: int = 0, *, comm: Communicator | None = None) -> None:
        super().__init__()
        self._root, self._comm = root, communicator_or_world(comm)
        self._is_verified = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Copy the values.

        Raises:
            MismatchError: the ranks have different models.
            UsageError: another optimizer stands around the distributed one.
        """
        model = self.model
        check_outermost(model.optimizer)
        self._is_verified = False
        variables = [*model.weights, *model.optimizer.variables]
        # Not by their paths, in which Keras numbers the models of a process.
        broadcast_parameters(
            self._comm, {f"variable {number}": each for number, each in enumerate(variables)}, self._root
        )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Check, after the first epoch, that all ranks hold the same trainable variables.

        Raises:
            MismatchError: the trainable variables differ between ranks.
        """
        if not self._is_verified:
            verify_trained(self.model)
            self._is_verified = True


class MetricAverage(keras.callbacks.Callback):  # type: ignore[misc]
    """Replaces the metrics of an epoch by their means over ranks, for the callbacks behind it and for the history.

    Pass it before callbacks that read metrics, such as `EarlyStopping` and `ReduceLROnPlateau`. All ranks then decide
    alike. Ranks count equally, so they need the same number of samples. For `model.evaluate`, pass its dict to
    `unisono.data_parallel.average_metrics`, because Keras gives callbacks a copy of its metrics there.

    Args:
        comm: the ranks; by default the world that `unisono.init` has made.
    """

    def __init__(self, *, comm: Communicator | None = None) -> None:
        super().__init__()
        self._comm = communicator_or_world(comm)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average the metrics of the epoch."""
        if logs:
            logs.update(average_metrics(self._comm, logs))


class LearningRateSchedule(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr * multiplier(epoch)``, as Horovod's callback of this name.

    Args:
        initial_lr: the learning rate that is multiplied.
        multiplier: a number, or a function of the epoch, which is a fraction within an epoch unless `staircase`.
        start_epoch, end_epoch: the first epoch, and the one after the last, in which the rate is set; None for no end.
        staircase: whether the rate is set once in an epoch. Otherwise it is set before each batch.
        momentum_correction: whether the momentum of `SGD` and `RMSprop` follows the rate. They add up changes, which
            contain the rate, so a new rate needs other sums (section 3 of the paper of `LearningRateWarmup`).
        steps_per_epoch: the batches of an epoch; needed where Keras does not know them.

    Attributes:
        logged_as: the name of the rate among the metrics.
    """

    logged_as = "learning_rate"

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        *,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self._initial_lr = initial_lr
        self._multiplier = multiplier if callable(multiplier) else lambda _: multiplier
        self._epochs = start_epoch, end_epoch
        self._staircase = staircase
        self._momentum_correction = momentum_correction
        self._steps = steps_per_epoch
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the rate of the epoch."""
        self._epoch = epoch
        if self._staircase:
            self._set(epoch)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the rate of the batch."""
        if not self._staircase:
            self._set(self._epoch + batch / self._steps_per_epoch())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the rate to the metrics."""
        if logs is not None:
            logs[self.logged_as] = float(self.model.optimizer.learning_rate)

    def _set(self, epoch: float) -> None:
        start, end = self._epochs
        if start <= epoch and (end is None or epoch < end):
            optimizer = self.model.optimizer
            before, after = float(optimizer.learning_rate), self._initial_lr * self._multiplier(epoch)
            optimizer.learning_rate = after
            if self._momentum_correction and before and before != after:
                # The sums are changed, because a compiled step contains the factor `momentum` as a constant.
                for moment in _moments(optimizer):
                    moment.assign(moment * (after / before))

    def _steps_per_epoch(self) -> int:
        steps = self._steps or self.params.get("steps")
        if not steps:
            raise UsageError("Keras does not know the batches of an epoch of this data: pass steps_per_epoch")
        return int(steps)


class LearningRateWarmup(LearningRateSchedule):
    """Raises the learning rate from that of one process to that of all ranks, batch by batch.

    A larger batch takes a larger learning rate, but not at once (P. Goyal et al., Accurate, Large Minibatch SGD:
    Training ImageNet in 1 Hour, 2017).

    Args:
        initial_lr: the learning rate after the warmup; mostly that of one process, times the number of ranks.
        warmup_epochs: the epochs in which it rises from ``initial_lr / size``.
        momentum_correction: as in `LearningRateSchedule`.
        steps_per_epoch: the batches of an epoch; needed where Keras does not know them.
        verbose: 1 to print the rate on rank 0 when the warmup has ended.
        comm: the ranks; by default the world that `unisono.init` has made.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        *,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
        comm: Communicator | None = None,
    ) -> None:
        world = communicator_or_world(comm)

        def multiplier(epoch: float) -> float:
            # The rates of the first batch and the last one are those after a batch of the warmup, and of all batches.
            trained = epoch + 1 / self._steps_per_epoch()
            return (1 + trained * (world.size - 1) / warmup_epochs) / world.size

        super().__init__(
            initial_lr,
            multiplier,
            0,
            warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self._last_epoch = warmup_epochs - 1
        self._prints = verbose > 0 and world.rank == 0

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the rate to the metrics, and print it when the warmup has ended."""
        super().on_epoch_end(epoch, logs)
        if self._prints and epoch == self._last_epoch:
            rate = float(self.model.optimizer.learning_rate)
            sys.stdout.write(f"\nEpoch {epoch + 1}: the warmup has ended with the learning rate {rate:g}\n")


def _moments(optimizer: Any) -> list[Any]:
    """Return the sums of changes of an optimizer with momentum."""
    if not getattr(optimizer, "momentum", 0):
        return []
    return list(getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", []))


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Writes checkpoints as Keras' callback of this name, on rank 0 only.

    Args:
        filepath: as in Keras.
        comm: the ranks; by default the world that `unisono.init` has made.
        options: the further arguments of Keras' callback.
    """

    def __init__(self, filepath: Any, *, comm: Communicator | None = None, **options: Any) -> None:
        super().__init__(filepath, **options)
        self._writes = communicator_or_world(comm).rank == 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Let Keras' callback write, if one is due after this batch, on rank 0 only."""
        if self._writes:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Let Keras' callback write, if one is due after this epoch, on rank 0 only."""
        if self._writes:
            super().on_epoch_end(epoch, logs)
