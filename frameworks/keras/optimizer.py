"""`DistributedOptimizer`: an optimizer of Keras that averages gradients over ranks before it applies them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras

from unisono import Communicator, MismatchError, UsageError
from unisono.data_parallel import verify_sync
from unisono.frameworks.keras.averages import average_for
from unisono.xla_programs import communicator_or_world

# The attribute of an optimizer that averages gradients: a function that compares variables between its ranks.
_VERIFY = "_unisono_verify"


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
    return distribute(optimizer, lambda gradients, _: average(gradients), lambda variables: verify(comm, variables))


def check_optimizer(optimizer: Any) -> None:
    """Check that an optimizer of Keras can be distributed; raises `UsageError`."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            f"optimizer must be an optimizer of Keras, such as keras.optimizers.Adam(), not {type(optimizer).__name__}"
        )
    if averages_gradients(optimizer):
        raise UsageError("this optimizer averages gradients already: pass it to DistributedOptimizer once")


def averages_gradients(optimizer: Any) -> bool:
    """Return whether an optimizer, or one in it, has been passed to `DistributedOptimizer`."""
    return any(hasattr(each, _VERIFY) for each in _with_inner(optimizer))


def check_outermost(optimizer: Any) -> None:
    """Check that no other optimizer stands around a distributed one; raises `UsageError`."""
    if averages_gradients(optimizer) and not hasattr(optimizer, _VERIFY):
        name = type(optimizer).__name__
        raise UsageError(
            f"a {name} is around the optimizer that averages gradients, so that each rank would decide by itself "
            f"whether to skip a step: pass the {name} to DistributedOptimizer, as in "
            "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(adam))"
        )


def verify_trained(model: Any, skipped: Sequence[Any] = ()) -> None:
    """Check that the ranks over which the optimizer of a model averages hold the same trainable variables.

    It does nothing if the optimizer is not distributed.

    Args:
        model: the model.
        skipped: variables that are those of each rank.

    Raises:
        MismatchError: they differ.
    """
    numbers = {id(variable) for variable in skipped}
    if check := getattr(model.optimizer, _VERIFY, None):
        check([variable for variable in model.trainable_variables if id(variable) not in numbers])


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


def distribute(
    optimizer: Any, average: Callable[[Sequence[Any], Any], list[Any]], verify: Callable[[list[Any]], None]
) -> Any:
    """Let an optimizer apply what `average` makes of gradients, and return it.

    Args:
        optimizer: an optimizer of Keras.
        average: takes the gradients of a step and their variables, or None for all variables of the optimizer; returns
            the averages over ranks.
        verify: compares variables between ranks.
    """
    plain = {name: getattr(optimizer, name) for name in ("apply", "apply_gradients", "stateless_apply")}
    running: list[str] = []

    def call(
        name: str, gradients: Sequence[Any], variables: Any, arguments: Callable[[list[Any]], Sequence[Any]]
    ) -> Any:
        """Call a method of the optimizer with averages, unless another one that calls it has got them already."""
        if running:
            return plain[name](*arguments(list(gradients)))
        averages = average(list(gradients), variables)
        running.append(name)
        try:
            return plain[name](*arguments(averages))
        finally:
            running.clear()

    # The methods by which trainers and other optimizers pass gradients. A class may define each of them without calling
    # another one: `LossScaleOptimizer`, on JAX, calls no `apply` of its own.
    def apply(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        return call("apply", grads, trainable_variables, lambda averages: (averages, trainable_variables))

    def apply_gradients(grads_and_vars: Iterable[tuple[Any, Any]], *others: Any) -> Any:
        grads, variables = zip(*grads_and_vars, strict=True)

        def arguments(averages: list[Any]) -> Any:
            return (zip(averages, variables, strict=True), *others)

        return call("apply_gradients", grads, variables, arguments)

    def stateless_apply(optimizer_variables: Any, grads: Sequence[Any], trainable_variables: Any) -> Any:
        return call(
            "stateless_apply", grads, None, lambda averages: (optimizer_variables, averages, trainable_variables)
        )

    # As functions of this object only: its class stays that of Keras.
    for function in (apply, apply_gradients, stateless_apply):
        object.__setattr__(optimizer, function.__name__, function)
    object.__setattr__(optimizer, _VERIFY, verify)
    return optimizer


def _with_inner(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer, and the optimizers in it."""
    yield optimizer
    if (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        yield from _with_inner(inner)
