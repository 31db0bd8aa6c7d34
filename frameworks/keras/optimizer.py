"""`DistributedOptimizer`: an optimizer of Keras that averages gradients over ranks before it applies them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono import Communicator, MismatchError
from unisono.data_parallel import verify_sync
from unisono.frameworks.keras.trainable import average_for, check_optimizer, distribute
from unisono.xla_programs import communicator_or_world


def DistributedOptimizer(optimizer: Any, comm: Communicator | None = None, **options: Any) -> Any:  # noqa: N802
    """Let an optimizer average gradients over ranks before it applies them, and return it.

    The optimizer keeps its class and its state. So a saved model does not depend on Unisono, and the optimizer of a
    model that has been loaded is passed to this function again. All ranks apply the same gradients in the same order.

    Args:
        optimizer: an optimizer of Keras. A `LossScaleOptimizer` is passed itself, and not the optimizer in it: all
            ranks must see the same gradients when it decides whether to skip a step.
        comm: the ranks; by default the world that `unisono.init` has made.
        options: further arguments of `GradientReducer`, such as `compression`, except `lag`; not on the backend JAX.

    Raises:
        UsageError: `optimizer` is no optimizer of Keras, or averages gradients already; or the backend takes no
            options; or there is a lag.
    """
    check_optimizer(optimizer)
    comm = communicator_or_world(comm)
    average = average_for(comm, options)
    return distribute(optimizer, lambda gradients, _: average(gradients), lambda variables: verify(comm, variables))


def verify(comm: Communicator, variables: Sequence[Any]) -> None:
    """Check that all ranks of `comm` hold the same variables; raises `MismatchError`."""
    try:
        verify_sync(comm, {f"variable {number} ({each.name})": each for number, each in enumerate(variables)})
    except MismatchError as error:
        error.message = (
            f"after the first epoch, the parameters are not the same on all ranks: {error.message}. Perhaps they were "
            "different at its start, or something else than the optimizer has changed them on one rank"
        )
        raise
