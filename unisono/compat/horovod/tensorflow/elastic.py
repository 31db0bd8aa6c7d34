"""Elastic training with TensorFlow: `run`, `TensorFlowKerasState` and `TensorFlowState`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import tensorflow as tf

from unisono.compat.horovod import elastic, errors
from unisono.compat.horovod.elastic import ObjectState, Result, State
from unisono.compat.horovod.errors import ArgumentError, HorovodInternalError
from unisono.compat.horovod.variables import ModelState, VariablesState

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]


class TensorFlowState(VariablesState):
    """A state of variables and of Python objects, which are its attributes.

    Args:
        variables: the variables.
        session: must be None, because a graph of TensorFlow 1 cannot go on with other ranks.
        objects: Python objects by name.

    Raises:
        ArgumentError: there is a session, or there are no variables.
    """

    def __init__(self, variables: Iterable[Any] | None = None, session: Any = None, **objects: Any) -> None:
        if session is not None or not tf.executing_eagerly():
            raise ArgumentError("elastic training needs eager mode: train by tf.function, without a session")
        listed = list(variables or ())
        if not listed:
            raise ArgumentError("there are no variables: pass those of the model, which has them when it is built")
        super().__init__(lambda: listed, **objects)


class TensorFlowKerasState(ModelState):
    """A state of a model of Keras, its optimizer and Python objects, which are its attributes.

    Args:
        model: the model, which has been built.
        optimizer: its optimizer; by default the one that it was compiled with.
        backend: ignored here.
        objects: Python objects by name.

    Raises:
        ArgumentError: the model has not been built, or there is no optimizer.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **objects: Any) -> None:
        super().__init__(model, optimizer, **objects)


def run(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a function ``train(state, …)`` so that it is called again after each change of the ranks.

    Errors of calls in graphs count, too. The rest is as in `unisono.compat.horovod.torch.elastic.run`.
    """

    @functools.wraps(function)
    def train(state: Any, *arguments: Any, **options: Any) -> Result:
        try:
            return function(state, *arguments, **options)
        except tf.errors.OpError as error:
            _raise_cause(error)

    return elastic.run(train)


def _raise_cause(error: Any) -> NoReturn:
    """Raise the error of Horovod that a call in a graph has raised, or `error` itself if it is another one."""
    for name, kind in vars(errors).items():
        is_error = isinstance(kind, type) and issubclass(kind, HorovodInternalError)
        if is_error and f"{name}: " in error.message:
            raise kind(error.message) from error
    raise error
