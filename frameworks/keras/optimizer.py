"""`DistributedOptimizer`: an optimizer of Keras that averages gradients over ranks before it applies them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from unisono import Communicator, UsageError
from unisono.frameworks.keras.averages import average_for
from unisono.programs import communicator_or_world

# The attribute of an optimizer that averages gradients.
MARK = "_unisono_ranks"


def DistributedOptimizer(optimizer: Any, comm: Communicator | None = None, **options: Any) -> Any:  # noqa: N802
    """Let an optimizer average gradients over ranks before it applies them, and return it.

    The optimizer keeps its class and its state. So a saved model does not depend on Unisono, and the optimizer of a
    model that has been loaded is passed to this function again. All ranks apply the same gradients in the same order.

    Args:
        optimizer: an optimizer of Keras. A `LossScaleOptimizer` is passed itself, and not the optimizer in it: all
            ranks must see the same gradients when it decides whether to skip a step.
        comm: the ranks; by default the world that `unisono.init` has made.
        options: further arguments of `GradientReducer`, such as `compression`; not on the backend JAX.

    Raises:
        UsageError: `optimizer` is no optimizer of Keras, or averages gradients already; or the backend takes no
            options.
    """
    check_optimizer(optimizer)
    comm = communicator_or_world(comm)
    average = average_for(comm, options)
    return distribute(optimizer, lambda gradients, _: average(gradients), comm.size)


def check_optimizer(optimizer: Any) -> None:
    """Check that an optimizer of Keras can be distributed; raises `UsageError`."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            f"optimizer must be an optimizer of Keras, such as keras.optimizers.Adam(), not {type(optimizer).__name__}"
        )
    if hasattr(optimizer, MARK):
        raise UsageError("this optimizer averages gradients already: pass it to DistributedOptimizer once")


def distribute(optimizer: Any, average: Callable[[Sequence[Any], Any], list[Any]], ranks: int) -> Any:
    """Let an optimizer apply what `average` makes of gradients, and return it.

    Args:
        optimizer: an optimizer of Keras.
        average: takes the gradients of a step and their variables, or None for all variables of the optimizer; returns
            the averages over ranks.
        ranks: how many ranks average.
    """
    apply = optimizer.apply

    def apply_averages(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        return apply(average(list(grads), trainable_variables), trainable_variables)

    # As functions of this object only: its class stays that of Keras.
    object.__setattr__(optimizer, "apply", apply_averages)
    object.__setattr__(optimizer, MARK, ranks)
    return optimizer
