"""`SyncBatchNormalization`: batch normalisation with the mean and the variance of the batches of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from unisono.compat.horovod.tensorflow.calls import allreduce


class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Like ``keras.layers.BatchNormalization``, with statistics over the batches of all ranks, which count equally.

    All ranks call it in the same order. It needs the backend TensorFlow of Keras.

    Args:
        fused: ignored here.
        options: the arguments of the layer of Keras.
    """

    def __init__(self, fused: bool = False, **options: Any) -> None:
        super().__init__(**options)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, mask)
        mean, of_squares = tf.unstack(allreduce(tf.stack([mean, variance + tf.square(mean)])))
        return mean, of_squares - tf.square(mean)
