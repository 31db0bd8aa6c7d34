"""Variables of TensorFlow and Keras: copying them from one rank to all, and a state of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from unisono.compat.horovod import arrays
from unisono.compat.horovod.elastic import ObjectState
from unisono.compat.horovod.errors import ArgumentError
from unisono.compat.horovod.process_sets import ProcessSet, global_process_set


def broadcast_values(variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Overwrite variables with those of the rank `root_rank`, by one call.

    Args:
        variables: objects with the methods `numpy` and `assign`, the same ones in the same order on all ranks.
        root_rank: the rank of the job whose variables are copied.
        process_set: the ranks that take part.

    Raises:
        ArgumentError: there are no variables.
        NameMismatchError: the ranks have different variables.
    """
    if not variables:
        raise ArgumentError("there are no variables to copy: a model has them after it has been built")
    copies = arrays.broadcast([np.asarray(each.numpy()) for each in variables], root_rank, None, process_set)
    for variable, copy in zip(variables, copies, strict=True):
        variable.assign(copy)


def weights_of(local_layers: Any) -> list[Any]:
    """Return the trainable weights of a layer of Keras, of a list of them, or of None; raises `ArgumentError`."""
    listed = (
        list(local_layers) if isinstance(local_layers, Iterable) else [] if local_layers is None else [local_layers]
    )
    if not all(hasattr(layer, "trainable_weights") for layer in listed):
        raise ArgumentError(f"local_layers must be layers of Keras, not {local_layers!r}")
    return [weight for layer in listed for weight in layer.trainable_weights]


class VariablesState(ObjectState):
    """A state of variables and of Python objects.

    Args:
        variables: returns the variables, which may become more while a program trains.
        objects: Python objects by name.
    """

    def __init__(self, variables: Callable[[], Sequence[Any]], **objects: Any) -> None:
        self._variables = variables
        super().__init__(**objects)

    def _save_parts(self) -> list[Any]:
        return [np.array(each.numpy()) for each in self._variables()]

    def _restore_parts(self, saved: list[Any]) -> None:
        # Variables that were made after the last commit keep their values.
        for variable, value in zip(self._variables(), saved, strict=False):
            variable.assign(value)

    def _sync_parts(self) -> None:
        broadcast_values(self._variables(), root_rank=0)


class ModelState(VariablesState):
    """A state of a model of Keras, its optimizer and Python objects, which are its attributes.

    Args:
        model: the model, which has been built.
        optimizer: its optimizer; by default the one that it was compiled with.
        objects: Python objects by name.

    Raises:
        ArgumentError: the model has not been built, or there is no optimizer.
    """

    def __init__(self, model: Any, optimizer: Any = None, **objects: Any) -> None:
        self.model: Any = model
        self.optimizer: Any = optimizer or getattr(model, "optimizer", None)
        if not getattr(model, "built", True):
            raise ArgumentError("the model has not been built: call model.build(input_shape) first")
        if self.optimizer is None:
            raise ArgumentError("the model has no optimizer: compile it, or pass optimizer")
        super().__init__(self._all, **objects)

    def _all(self) -> list[Any]:
        # On the backend JAX, variables have no values while `fit` runs.
        getattr(self.model, "jax_state_sync", lambda: None)()
        # A rank that has just started has the same variables as the others then.
        if not getattr(self.optimizer, "built", True):
            self.optimizer.build(self.model.trainable_variables)
        return [*self.model.variables, *self.optimizer.variables]
