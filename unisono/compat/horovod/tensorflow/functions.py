"""Copying variables and Python objects from one rank to all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from unisono.compat.horovod import objects
from unisono.compat.horovod.process_sets import ProcessSet, global_process_set
from unisono.compat.horovod.tensorflow.calls import broadcast_all
from unisono.frameworks.tensorflow.sessions import BroadcastGlobalVariablesHook as _Hook


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Overwrite variables with those of the rank `root_rank`, by one call.

    Args:
        variables: variables of TensorFlow or Keras, the same ones in the same order on all ranks.
        root_rank: the rank of the job whose variables are copied.
        process_set: the ranks that take part.
        inplace: ignored here.

    Returns:
        None in eager mode. In a graph, the operation that copies.
    """
    listed = list(variables)
    if not listed:
        return None if tf.executing_eagerly() else tf.no_op()
    copies = broadcast_all([tf.convert_to_tensor(each) for each in listed], root_rank, None, process_set)
    assigned = [variable.assign(copy) for variable, copy in zip(listed, copies, strict=True)]
    return None if tf.executing_eagerly() else tf.group(*assigned)


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Overwrite variables with those of the rank `root_rank`, and return their values."""
    copies = broadcast_all([tf.convert_to_tensor(each) for each in variables], root_rank, name, process_set)
    for variable, copy in zip(variables, copies, strict=True):
        variable.assign(copy)
    return copies


def broadcast_global_variables(root_rank: int) -> Any:
    """Return the operation that overwrites all global variables of a graph of TensorFlow 1.

    Raises:
        RuntimeError: in eager mode, in which there are no global variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution: use hvd.broadcast_variables(variables)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(_Hook):
    """Copies the global variables of the rank `root_rank` to all ranks when a session has been made.

    Args:
        root_rank: the rank whose variables are copied.
        device: ignored here.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__(root_rank)
        self._root_rank = root_rank

    def begin(self) -> None:
        """Add the operation that copies the variables to the graph, which can still be changed."""
        self._copying = broadcast_global_variables(self._root_rank)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of the rank `root_rank`; other ranks' `obj` is ignored. It travels as a pickle.

    `session` is ignored here, because no graph is needed.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Return a function that takes an object and returns that of the rank `root_rank`; see `broadcast_object`."""
    return lambda obj: objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in the order of ranks. They travel as pickles. `session` is ignored here."""
    return objects.allgather_object(obj, name, process_set)
