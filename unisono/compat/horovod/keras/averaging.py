"""`OfKeras`: the gradients of an optimizer of Keras on the backends torch and JAX."""

from __future__ import annotations

from typing import Any

import keras

from unisono.compat.horovod import job
from unisono.compat.horovod.averaging import Averaging
from unisono.compat.horovod.errors import ArgumentError
from unisono.compat.horovod.reducers import JobReducer
from unisono.frameworks.keras.trainable import allreduced


class OfKeras(Averaging):
    """Averages lists of gradients. On torch, a `GradientReducer` does; on JAX, a compiled step has calls for them.

    The arguments and errors are those of `Averaging`. There are neither Adasum nor compressors of the program, and on
    JAX no compression.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self._op == "adasum":
            raise ArgumentError("op=Adasum is for the backend TensorFlow: use Average")
        if self._form.compressor is not None:
            raise ArgumentError("compressors of your own are for the backend TensorFlow: use Compression.fp16")
        self._comm: Any = None  # of the calls in a compiled step
        self._is_compiled = keras.backend.backend() == "jax"
        if self._is_compiled and self._is_half:
            raise ArgumentError("on the backend JAX gradients are averaged in the compiled step: leave compression out")
        if self._is_compiled and self._process_set.included() is not False:
            self._comm = job.communicator(self._process_set)

    def _reduced(self, gradients: list[Any]) -> list[Any]:
        if not self._is_compiled:
            return super()._reduced(gradients)
        return gradients if self._comm is None else allreduced(self._comm, gradients, self._op)

    def _reducer(self, gradients: Any) -> JobReducer:
        # One for all steps, whichever gradients a rank has.
        return next(iter(self._reducers.values()), None) or super()._reducer(gradients)
