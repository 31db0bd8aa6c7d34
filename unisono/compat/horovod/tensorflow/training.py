"""`DistributedGradientTape` and `DistributedOptimizer`: gradients that are averaged over ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from unisono.compat.horovod.arguments import Average
from unisono.compat.horovod.errors import ArgumentError
from unisono.compat.horovod.keras import training as of_keras
from unisono.compat.horovod.process_sets import ProcessSet, global_process_set
from unisono.compat.horovod.reducers import JobReducer
from unisono.compat.horovod.tensorflow.averaging import OfTensorFlow
from unisono.compat.horovod.tensorflow.compression import Compression
from unisono.compat.horovod.variables import weights_of
from unisono.frameworks.tensorflow.sessions import SessionOptimizer
from unisono.frameworks.tensorflow.training import DistributedGradientTape as _Tape

# By their gradients, the reducers of all tapes: in eager mode each step has a tape of its own.
_reducers_of_tapes: dict[Any, JobReducer] = {}


class _DistributedGradientTape(_Tape):
    """A tape whose `gradient` returns averages over ranks, with the methods of Horovod."""

    def __init__(self, tape: Any, averaging: OfTensorFlow) -> None:
        super().__init__(tape)
        self._averaging = averaging

    def register_local_source(self, source: Any) -> None:
        """Let the gradients of a variable stay those of this rank."""
        self._averaging.add_local(source)

    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False, **options: Any
    ) -> Any:
        """Return the gradients, averaged over ranks, in the structure of `sources`. `use_generic_names` is ignored."""
        gradients = self._tape.gradient(target, sources, output_gradients, **options)
        flat = tf.nest.flatten(gradients, expand_composites=False)
        return tf.nest.pack_sequence_as(sources, self._averaging.average(flat, tf.nest.flatten(sources)))

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return pairs of a variable and its gradient: those of local variables, and the averages of the others."""
        pairs = list(zip(sources, self.gradient(target, sources, output_gradients), strict=True))
        local = [pair for pair in pairs if self._averaging.is_local(pair[0])]
        return local, [pair for pair in pairs if not self._averaging.is_local(pair[0])]


def DistributedGradientTape(  # noqa: N802  (the name of Horovod, whose result is a tape)
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a tape whose `gradient` returns averages over ranks. Use it like the tape that it wraps.

    All ranks call `gradient` in the same order, for the same variables. Tapes share a reducer for gradients of the same
    shapes and dtypes, so a step may make a new tape.

    Args:
        gradtape: the ``tf.GradientTape`` that records the forward pass.
        device_dense: ignored here.
        device_sparse: ignored here.
        compression: the form in which gradients travel. ``Compression.fp16`` is the "float16" of `GradientReducer`,
            which also corrects rounding errors.
        sparse_as_dense: whether an ``IndexedSlices`` is made dense. Otherwise ranks gather its values and indices.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: gradients are divided by it before the sum, and multiplied by it after. For Average.
        num_groups: an old form of `groups`.
        groups: checked, and without effect: all gradients of a step are passed in one call.
        process_set: the ranks whose gradients are averaged. Other ranks get their own.
        scale_local_gradients: whether gradients of local variables are divided by the number of ranks.

    Raises:
        ArgumentError, UsageError: an argument has a value that it cannot have.
    """
    averaging = OfTensorFlow(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        predivide=gradient_predivide_factor,
        groups=groups if groups is not None else num_groups or None,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        reducers=_reducers_of_tapes,
    )
    return _DistributedGradientTape(gradtape, averaging)


def PartialDistributedGradientTape(  # noqa: N802  (the name of Horovod)
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a `DistributedGradientTape` that leaves the gradients of `local_layers`, one or many, as they are."""
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in weights_of(local_layers):
        tape.register_local_source(variable)
    return tape


def DistributedOptimizer(  # noqa: N802  (the name of Horovod, whose result is an optimizer)
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer that averages gradients over ranks before it applies them.

    Args:
        optimizer: an optimizer of ``tf.compat.v1.train``, which is wrapped; or one of Keras, which is changed: see
            `unisono.compat.horovod.keras`.
        name: ignored here.
        use_locking: ignored here.
        device_dense: ignored here.
        device_sparse: ignored here.
        compression: as in `DistributedGradientTape`.
        sparse_as_dense: as in `DistributedGradientTape`.
        backward_passes_per_step: how many backward passes accumulate gradients before they are applied; only for an
            optimizer of Keras.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: as in `DistributedGradientTape`.
        average_aggregated_gradients: whether accumulated gradients are divided by `backward_passes_per_step`.
        num_groups: an old form of `groups`.
        groups: checked, and without effect.
        process_set: the ranks whose gradients are averaged.
        scale_local_gradients: whether gradients of local variables are divided by the number of ranks.

    Raises:
        ArgumentError, UsageError: an argument has a value that it cannot have.
    """
    options = {
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
        "op": op,
        "groups": groups if groups is not None else num_groups or None,
        "process_set": process_set,
        "scale_local_gradients": scale_local_gradients,
    }
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if backward_passes_per_step != 1:
            raise ArgumentError(
                "backward_passes_per_step is for optimizers of Keras: let an optimizer of TensorFlow 1 make each step"
            )
        return SessionOptimizer(optimizer, OfTensorFlow(predivide=gradient_predivide_factor, **options).average)
    return of_keras.DistributedOptimizer(
        optimizer,
        gradient_predivide_factor=gradient_predivide_factor,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        **options,
    )
