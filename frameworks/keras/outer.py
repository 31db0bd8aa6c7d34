"""`DiLoCo`, `BlockMomentum` and `LocalSGD` for Keras: callbacks of `model.fit` that now and then join the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import keras

from unisono import Communicator, UsageError
from unisono.data_parallel import broadcast_parameters
from unisono.frameworks.outer import training
from unisono.xla_programs import communicator_or_world

if TYPE_CHECKING:
    from unisono import Swarm


class DiLoCo(keras.callbacks.Callback):  # type: ignore[misc]
    """Lets ranks train alone in `model.fit`, and joins their changes every `inner_steps` batches.

    Compile the model with an optimizer of Keras as it is. When training begins, the weights of rank 0 are copied to all
    ranks. When it ends, all ranks get the same trainable weights. In between, `unisono.data_parallel.DiLoCo`
    averages them. All ranks must train on the same number of batches.

    On a swarm, training begins with the trainable weights that the members share. The other weights, such as the means
    of batch normalization, stay those of each member. All members must pass the same `steps`, and enough epochs
    to reach it.

    Args:
        comm: the ranks, or a swarm; by default the world that `unisono.init` has made.
        steps: the number of batches after which training ends; on a newcomer of a swarm, the batches
            that the others made before it entered count too. By default, `model.fit` decides.
        options: the arguments of `unisono.data_parallel.DiLoCo`, such as `inner_steps`.

    Attributes:
        outer: the outer optimizer of the present or last training; None before it.

    Raises:
        UsageError: `comm` is a swarm, and there is no number of steps.
    """

    _kind: ClassVar[type[training.DiLoCo]] = training.DiLoCo

    def __init__(self, *, comm: Communicator | Swarm | None = None, steps: int | None = None, **options: Any) -> None:
        super().__init__()
        self._world = communicator_or_world(comm) if comm is None or isinstance(comm, Communicator) else comm
        if steps is None and not isinstance(self._world, Communicator):
            raise UsageError("members of a swarm begin at different times, and end together: pass steps")
        self._steps, self._options = steps, options
        self.outer: training.DiLoCo | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Copy the weights of rank 0, and begin to train with `DiLoCo`.

        Raises:
            UsageError, MismatchError: as for `unisono.data_parallel.DiLoCo`.
        """
        if self.outer is not None:  # its training may have ended with an error
            self.outer.close()
        if isinstance(self._world, Communicator):
            weights = {f"weight {number}": each for number, each in enumerate(self.model.weights)}
            broadcast_parameters(self._world, weights)
        self.outer = self._kind(self._world, _named(self.model), **self._options)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count a step, and join the changes that are due after it."""
        if self.outer is not None:
            if self._steps is None or self.outer.steps < self._steps:
                _fetch(self.model)
                self.outer.step(_named(self.model))
            if self._steps is not None and self.outer.steps >= self._steps:
                self.model.stop_training = True

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Average all trainable weights, and close the communicators."""
        if self.outer is not None:
            _fetch(self.model)
            self.outer.synchronize(_named(self.model))
            self.outer.close()


class BlockMomentum(DiLoCo):
    """`DiLoCo` with the defaults of `unisono.data_parallel.BlockMomentum`."""

    _kind = training.BlockMomentum


class LocalSGD(DiLoCo):
    """`DiLoCo` with the defaults of `unisono.data_parallel.LocalSGD`."""

    _kind = training.LocalSGD


def _fetch(model: Any) -> None:
    """Let the variables of a model have the weights of the training on JAX, which keeps them elsewhere meanwhile."""
    if keras.backend.backend() == "jax":
        model.jax_state_sync()


def _named(model: Any) -> dict[str, Any]:
    """Return the trainable variables by names that are equal on all ranks.

    The variables of a layer have names that are equal up to a dot.
    """
    # Not by their paths alone, in which Keras numbers the models of a process.
    numbers: dict[str, int] = {}
    named: dict[str, Any] = {}
    for variable in model.trainable_variables:
        layer = numbers.setdefault(variable.path.rpartition("/")[0], len(numbers))
        named[f"layer {layer}.{len(named)}"] = variable
    return named
