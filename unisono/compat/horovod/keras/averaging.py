"""`Averaging`: the gradients of an optimizer of Keras on the backends torch and JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from unisono.compat.horovod import job
from unisono.compat.horovod.arguments import check_groups, gradient_op
from unisono.compat.horovod.compression import Compressor, HalfCompressor, NoneCompressor
from unisono.compat.horovod.errors import ArgumentError
from unisono.compat.horovod.process_sets import ProcessSet
from unisono.compat.horovod.reducers import JobReducer
from unisono.frameworks.training.averager import averages


class Averaging:
    """Averages lists of gradients, of which each step has one.

    On torch, a `GradientReducer` averages them. On JAX, a compiled step has a call for each gradient.

    Args:
        compression: the compressor; on JAX there is none.
        sparse_as_dense: ignored here, because gradients of these backends are dense.
        op: Average or Sum.
        predivide: gradients are divided by it before they are averaged, and multiplied by it after.
        groups: checked, and without effect.
        process_set: the ranks.
        scale_local_gradients: whether gradients of local variables are divided by the number of ranks.

    Raises:
        ArgumentError, UsageError: an argument has a value that it cannot have.
    """

    def __init__(
        self,
        *,
        compression: type[Compressor],
        sparse_as_dense: bool,
        op: int,
        predivide: float,
        groups: Any,
        process_set: ProcessSet,
        scale_local_gradients: bool,
    ) -> None:
        self._op = gradient_op(op, float(predivide), process_set)
        check_groups(groups)
        if self._op == "adasum":
            raise ArgumentError("op=Adasum is for the backend TensorFlow: use Average")
        if not issubclass(compression, (NoneCompressor, HalfCompressor)):
            raise ArgumentError("compressors of your own are for the backend TensorFlow: use Compression.fp16")
        self._is_half = issubclass(compression, HalfCompressor)
        self._predivide, self._process_set = float(predivide), process_set
        self._scale_local_gradients = scale_local_gradients
        self._local: set[int] = set()
        self._reducer: JobReducer | None = None
        self._average = self._on_jax() if keras.backend.backend() == "jax" else self._on_torch

    def add_local(self, variable: Any) -> None:
        """Let the gradients of a variable stay those of this rank."""
        self._local.add(id(variable))

    def is_local(self, variable: Any) -> bool:
        """Return whether the gradients of a variable stay those of this rank."""
        return id(variable) in self._local

    def average(self, gradients: Sequence[Any], variables: Sequence[Any] = ()) -> list[Any]:
        """Return the averages over ranks; arguments and results are those of the class for TensorFlow."""
        is_local = [self.is_local(variable) for variable in variables]
        is_local += [False] * (len(gradients) - len(is_local))
        ranks = self._process_set.size() or 1
        sent = [
            None if local or gradient is None else gradient / self._predivide
            for gradient, local in zip(gradients, is_local, strict=True)
        ]
        result = [None if average is None else average * self._predivide for average in self._average(sent)]
        for place, local in enumerate(is_local):
            if local and gradients[place] is not None:
                result[place] = gradients[place] / (ranks if self._scale_local_gradients else 1)
        return result

    def _on_torch(self, gradients: Sequence[Any]) -> list[Any]:
        reducer = self._reducer_of(gradients)
        if not reducer.averages():
            return list(gradients)
        with reducer.step() as opened:
            return averages(opened, gradients)

    def _reducer_of(self, gradients: Sequence[Any]) -> JobReducer:
        if self._reducer is None:
            shapes = [None if each is None else (str(each.dtype), tuple(each.shape)) for each in gradients]
            signature = repr((shapes, self._op, self._is_half))
            self._reducer = JobReducer(signature, self._process_set, self._op, is_half=self._is_half)
        return self._reducer

    def _on_jax(self) -> Any:
        from unisono.frameworks.jax.collectives import allreduce

        if self._is_half:
            raise ArgumentError("on the backend JAX gradients are averaged in the compiled step: leave compression out")
        if self._process_set.included() is False:
            return list
        comm = job.communicator(self._process_set)

        def average(gradients: Sequence[Any]) -> list[Any]:
            return [None if each is None else allreduce(each, self._op, comm=comm) for each in gradients]

        return average
