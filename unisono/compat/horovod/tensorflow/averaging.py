"""`Averaging`: the gradients of tapes and optimizers, averaged by a `GradientReducer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from unisono.compat.horovod.arguments import Adasum, check_groups, gradient_op
from unisono.compat.horovod.compression import Compressor, HalfCompressor, NoneCompressor
from unisono.compat.horovod.errors import ArgumentError
from unisono.compat.horovod.process_sets import ProcessSet, global_process_set
from unisono.compat.horovod.reducers import JobReducer
from unisono.compat.horovod.tensorflow.calls import allreduce, grouped_allreduce, size_op
from unisono.frameworks.tensorflow.training import averaged, step


class Averaging:
    """Averages lists of gradients, of which each step has one.

    Ranks that have joined take part in the steps without gradients. Gradients of other shapes are those of another
    reducer, which is kept for later steps.

    Args:
        compression: the compressor. ``Compression.fp16`` is the "float16" of `GradientReducer`.
        sparse_as_dense: whether an ``IndexedSlices`` is made dense. Otherwise ranks gather its values and indices.
        op: Average, Sum or Adasum.
        predivide: gradients are divided by it before they are averaged, and multiplied by it after.
        groups: checked, and without effect: all gradients of a step are passed in one call.
        process_set: the ranks.
        scale_local_gradients: whether gradients of local variables are divided by the number of ranks.
        reducers: reducers that are shared with other objects of the same arguments, by their gradients.

    Raises:
        ArgumentError, UsageError: an argument has a value that it cannot have.
    """

    def __init__(
        self,
        *,
        compression: type[Compressor] = NoneCompressor,
        sparse_as_dense: bool = False,
        op: int,
        predivide: float = 1.0,
        groups: Any = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        reducers: dict[Any, JobReducer] | None = None,
    ) -> None:
        self._op = gradient_op(op, float(predivide), process_set)
        check_groups(groups)
        self._compression, self._sparse_as_dense = compression, sparse_as_dense
        self._predivide, self._process_set = float(predivide), process_set
        self._scale_local_gradients = scale_local_gradients
        self._reducers: dict[Any, JobReducer] = {} if reducers is None else reducers
        self._local: set[Any] = set()

    def add_local(self, variable: Any) -> None:
        """Let the gradients of a variable stay those of this rank."""
        self._local.add(_key(variable))

    def is_local(self, variable: Any) -> bool:
        """Return whether the gradients of a variable stay those of this rank."""
        return _key(variable) in self._local

    def average(self, gradients: Sequence[Any], variables: Sequence[Any] = ()) -> list[Any]:
        """Return the averages over ranks, in eager mode or in a graph.

        Args:
            gradients: tensors and ``IndexedSlices``, or None where there is no gradient.
            variables: the variable of each gradient; may be left out if no variable is local.
        """
        result: list[Any] = list(gradients)
        dense: list[Any] = [None] * len(result)
        for place, gradient in enumerate(result):
            if gradient is None:
                continue
            if self._local and self.is_local(variables[place]):
                result[place] = self._scaled(gradient)
            elif isinstance(gradient, tf.IndexedSlices) and not self._sparse_as_dense:
                result[place] = self._gathered(gradient)
            else:
                dense[place] = tf.convert_to_tensor(gradient)
        for place, average in enumerate(self._averaged(dense)):
            if average is not None:
                result[place] = average
        return result

    def _scaled(self, gradient: Any) -> Any:
        if not self._scale_local_gradients:
            return gradient
        ranks = size_op(self._process_set.process_set_id or 0)
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / tf.cast(ranks, gradient.values.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(ranks, gradient.dtype)

    def _gathered(self, gradient: Any) -> Any:
        if self._op == "adasum":
            raise ArgumentError("op=Adasum takes dense gradients: pass sparse_as_dense=True")
        return allreduce(gradient, average=self._op == "avg", process_set=self._process_set)

    def _averaged(self, gradients: list[Any]) -> list[Any]:
        """Return the averages of tensors."""
        if all(gradient is None for gradient in gradients):
            return gradients
        encoded = [(None, None) if gradient is None else self._encoded(gradient) for gradient in gradients]
        averages = self._reduced([gradient for gradient, _ in encoded])
        return [
            None if average is None else self._decoded(average, context)
            for average, (_, context) in zip(averages, encoded, strict=True)
        ]

    def _encoded(self, gradient: Any) -> tuple[Any, Any]:
        """Return the tensor to send for a gradient, and what `_decoded` needs."""
        if self._predivide != 1.0:
            gradient = gradient / tf.cast(self._predivide, gradient.dtype)
        return self._compression.compress(gradient) if self._compresses_itself() else (gradient, None)

    def _decoded(self, average: Any, context: Any) -> Any:
        if self._compresses_itself():
            average = self._compression.decompress(average, context)
        return average if self._predivide == 1.0 else average * tf.cast(self._predivide, average.dtype)

    def _compresses_itself(self) -> bool:
        """Return whether gradients are compressed by the class of the program, and not by the reducer."""
        return not issubclass(self._compression, (NoneCompressor, HalfCompressor))

    def _reduced(self, gradients: list[Any]) -> list[Any]:
        if self._op == "adasum":
            at = [place for place, gradient in enumerate(gradients) if gradient is not None]
            combined = grouped_allreduce([gradients[place] for place in at], op=Adasum)
            return _at(len(gradients), dict(zip(at, combined, strict=True)))
        reducer = self._reducer(gradients)

        def reduced(places: Sequence[int], *arrays: Any) -> list[Any]:
            if not reducer.averages():
                return list(arrays)
            with reducer.step() as opened:
                return step(opened, places, arrays)

        return averaged(reduced, gradients)

    def _reducer(self, gradients: Sequence[Any]) -> JobReducer:
        shapes = tuple(None if each is None else (each.dtype.name, str(each.shape)) for each in gradients)
        is_half = issubclass(self._compression, HalfCompressor)
        key = shapes, self._op, is_half, self._process_set
        if key not in self._reducers:
            signature = repr((shapes, self._op, is_half))
            self._reducers[key] = JobReducer(signature, self._process_set, self._op, is_half=is_half)
        return self._reducers[key]


def _key(variable: Any) -> Any:
    """Return an object that is equal for one variable only; variables themselves compare by their elements."""
    return variable.ref() if hasattr(variable, "ref") else id(variable)


def _at(count: int, values: Mapping[int, Any]) -> list[Any]:
    return [values.get(place) for place in range(count)]
