"""Data-parallel training by TensorFlow: variables that are alike, and gradients that are averaged over ranks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from unisono import Communicator, GradientReducer, UsageError
from unisono.data_parallel import broadcast_parameters
from unisono.frameworks.tensorflow.calls import called
from unisono.frameworks.tensorflow.trainable import dense, run
from unisono.frameworks.training.averager import averages, check_without_lag
from unisono.xla_programs import communicator_or_world


class Averager:
    """Averages lists of gradients over ranks: all gradients of a step in one call.

    A call of `average` is a step of a `GradientReducer`. Errors of one rank, such as a gradient of another shape, are
    raised on all ranks. All ranks make the same calls in the same order. One thread at a time averages.

    Args:
        comm: the ranks; by default the world that `unisono.init` has made.
        options: further arguments of `GradientReducer`, such as `compression`, except `lag`.

    Raises:
        UsageError: there is a lag.
    """

    def __init__(self, comm: Communicator | None = None, **options: Any) -> None:
        check_without_lag(options)
        self._comm, self._options = comm, options
        self._reducer: GradientReducer | None = None
        self._lock = threading.Lock()

    def average(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the averages over all ranks, in eager mode or in a graph.

        Args:
            gradients: tensors, or None where there is no gradient. An ``IndexedSlices`` is made dense.
        """
        return run(self._reduce, [dense(gradient) for gradient in gradients])

    def close(self) -> None:
        """Close the communicators."""
        if self._reducer is not None:
            self._reducer.close()

    def _reduce(self, gradients: list[Any]) -> list[Any]:
        with self._lock:
            if self._reducer is None:
                self._reducer = GradientReducer(communicator_or_world(self._comm), **self._options)
            return averages(self._reducer, gradients)


# By communicator, and by shapes and dtypes of the gradients, the averagers of tapes that have none of their own.
_shared: weakref.WeakKeyDictionary[Communicator, dict[Any, Averager]] = weakref.WeakKeyDictionary()


def _shared_averager(comm: Communicator, gradients: Sequence[Any]) -> Averager:
    signature = tuple(None if x is None else (x.dtype.name, str(x.shape)) for x in gradients)
    averagers = _shared.setdefault(comm, {})
    if signature not in averagers:
        averagers[signature] = Averager(weakref.proxy(comm))
    return averagers[signature]


class DistributedGradientTape:
    """A ``tf.GradientTape`` whose `gradient` returns the average over ranks. Use it like the tape that it wraps.

    Args:
        tape: the tape that records the forward pass.
        comm: the ranks; by default the world that `unisono.init` has made.
        averager: averages the gradients, for other options than those of `GradientReducer`. By default, all tapes of a
            communicator share an averager for gradients of the same shapes and dtypes.

    All ranks call `gradient` in the same order, for the same variables.
    """

    def __init__(self, tape: Any, comm: Communicator | None = None, averager: Averager | None = None) -> None:
        self._tape, self._comm, self._averager = tape, comm, averager

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        if name == "_tape":
            raise AttributeError(name)
        return getattr(self._tape, name)

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the gradients, averaged over ranks, in the structure of `sources`."""
        gradients = self._tape.gradient(target, sources, *args, **kwargs)
        flat = tf.nest.flatten(gradients, expand_composites=False)
        averager = self._averager or _shared_averager(communicator_or_world(self._comm), flat)
        return tf.nest.pack_sequence_as(sources, averager.average(flat))

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `UsageError`: a Jacobian is not averaged."""
        raise UsageError("a DistributedGradientTape averages gradients only: call jacobian() of the tape itself")

    batch_jacobian = jacobian


def broadcast_variables(variables: Iterable[Any], root: int = 0, *, comm: Communicator | None = None) -> Any:
    """Copy the values of rank `root` to the variables of all ranks. All ranks pass the same variables, in one order.

    Args:
        variables: variables of TensorFlow or Keras.
        root: the rank whose values are copied.
        comm: the communicator; by default the world that `unisono.init` has made.

    Returns:
        None in eager mode. In a graph, the operation that copies.

    Raises:
        UsageError: there are no variables.
        MismatchError: in eager mode, the variables differ in number, shape or dtype between ranks.
    """
    world = communicator_or_world(comm)
    listed = list(variables)
    if not listed:
        raise UsageError("there are no variables to copy: a model has them after it has been built")
    if tf.executing_eagerly():
        broadcast_parameters(world, {f"variable {number}": each for number, each in enumerate(listed)}, root)
        return None
    values = [tf.convert_to_tensor(variable) for variable in listed]
    # In one call, because a session may run operations in any order.
    copies = called(
        lambda *arrays: [world.broadcast(array, root) for array in arrays], values, [value.shape for value in values]
    )
    return tf.group(*(variable.assign(copy) for variable, copy in zip(listed, copies, strict=True)))
