"""The gradients of an optimizer of Keras: where they come in, and how each backend averages them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import keras

from unisono import Communicator, GradientReducer, UsageError
from unisono.frameworks.training.averager import averages, check_without_lag

# Takes the gradients of a step, and returns their averages. A gradient is None where a variable has none.
Average: TypeAlias = Callable[[Sequence[Any]], "list[Any]"]
# The attribute of an optimizer that averages gradients: a function that compares variables between its ranks.
_VERIFY = "_unisono_verify"


def average_for(comm: Communicator, options: dict[str, Any]) -> Average:
    """Return the function that averages gradients on the backend of this process.

    Args:
        comm: the ranks.
        options: further arguments of `GradientReducer`.

    Raises:
        UsageError: Unisono has none for this backend, the backend takes no options, or there is a lag.
    """
    backend = keras.backend.backend()
    if backend not in _BY_BACKEND:
        raise UsageError(
            f"Keras uses the backend {backend!r}, on which gradients are not averaged: set KERAS_BACKEND to one of "
            f"{', '.join(_BY_BACKEND)}"
        )
    return _BY_BACKEND[backend](comm, options)


def _on_torch(comm: Communicator, options: dict[str, Any]) -> Average:
    check_without_lag(options)
    return partial(averages, GradientReducer(comm, **options))


def _on_tensorflow(comm: Communicator, options: dict[str, Any]) -> Average:
    from unisono.frameworks.tensorflow.training import Averager

    return Averager(comm, **options).average


def _on_jax(comm: Communicator, options: dict[str, Any]) -> Average:
    if options:
        raise UsageError(
            f"on the backend 'jax' gradients are averaged inside the compiled step, which takes no {', '.join(options)}"
        )
    return lambda gradients: allreduced(comm, gradients)


def allreduced(comm: Communicator, gradients: Sequence[Any], op: str = "avg") -> list[Any]:
    """Return the averages or sums of gradients on the backend JAX, inside or outside of a compiled program."""
    from unisono.frameworks.jax.collectives import allreduce

    return [None if gradient is None else allreduce(gradient, op, comm=comm) for gradient in gradients]


_BY_BACKEND: dict[str, Callable[[Communicator, dict[str, Any]], Average]] = {
    "torch": _on_torch,
    "tensorflow": _on_tensorflow,
    "jax": _on_jax,
}


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


def distribute(
    optimizer: Any, average: Callable[[Sequence[Any], Any], list[Any]], verify: Callable[[list[Any]], None]
) -> Any:
    """Make an optimizer apply the averages that `average` returns for its gradients. Return the optimizer.

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
