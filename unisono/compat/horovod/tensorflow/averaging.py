"""`OfTensorFlow`: the gradients of tapes and optimizers of TensorFlow, in eager mode or in a graph."""

from __future__ import annotations

from functools import partial
from typing import Any

import tensorflow as tf

from unisono.compat.horovod.arguments import Adasum
from unisono.compat.horovod.averaging import Averaging
from unisono.compat.horovod.errors import ArgumentError
from unisono.compat.horovod.tensorflow.calls import allreduce, grouped_allreduce, size_op
from unisono.frameworks.tensorflow import trainable


class OfTensorFlow(Averaging):
    """Averages lists of tensors and ``IndexedSlices``. The arguments and errors are those of `Averaging`."""

    def _scaled(self, gradient: Any) -> Any:
        ranks = size_op(self._process_set.process_set_id or 0)
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / tf.cast(ranks, gradient.values.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(ranks, gradient.dtype)

    def _is_sparse(self, gradient: Any) -> bool:
        return trainable.is_sparse(gradient)

    def _gathered(self, gradient: Any) -> Any:
        if self._op == "adasum":
            raise ArgumentError("op=Adasum takes dense gradients: pass sparse_as_dense=True")
        return allreduce(gradient, average=self._op == "avg", process_set=self._process_set)

    def _dense(self, gradient: Any) -> Any:
        return trainable.dense(gradient)

    def _reduced(self, gradients: list[Any]) -> list[Any]:
        if self._op != "adasum":
            return trainable.run(partial(self._step, self._reducer(gradients)), gradients)
        combined = iter(grouped_allreduce([each for each in gradients if each is not None], op=Adasum))
        return [None if each is None else next(combined) for each in gradients]
