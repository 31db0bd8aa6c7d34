"""`DistributedOptimizer`: an optimizer of Keras that averages gradients over ranks; and `load_model`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras

from unisono.compat.horovod import job
from unisono.compat.horovod.arguments import Average, check_passes
from unisono.compat.horovod.compression import NoneCompressor
from unisono.compat.horovod.errors import ArgumentError
from unisono.compat.horovod.process_sets import ProcessSet, global_process_set
from unisono.compat.horovod.variables import weights_of
from unisono.frameworks.keras.optimizer import verify
from unisono.frameworks.keras.trainable import check_optimizer, distribute


def DistributedOptimizer(  # noqa: N802  (the name of Horovod, whose result is an optimizer)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = NoneCompressor,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Let an optimizer average gradients over ranks before it applies them, and return it.

    The optimizer keeps its class and its state, so a saved model does not depend on Unisono.

    Args:
        optimizer: an optimizer of Keras. Pass a `LossScaleOptimizer` itself, and not the optimizer in it.
        name: ignored here.
        device_dense: ignored here.
        device_sparse: ignored here.
        compression: the form in which gradients travel. ``Compression.fp16`` is the "float16" of `GradientReducer`; not
            on the backend JAX.
        sparse_as_dense: on the backend TensorFlow, whether an ``IndexedSlices`` is made dense.
        gradient_predivide_factor: gradients are divided by it before the sum, and multiplied by it after. For Average.
        op: Average or Sum, and on the backend TensorFlow also Adasum.
        backward_passes_per_step: how many steps of `fit` accumulate gradients before they are applied, by the
            `gradient_accumulation_steps` of the optimizer. The gradients of each of these steps are
            averaged over ranks.
        average_aggregated_gradients: whether accumulated gradients are divided by `backward_passes_per_step`.
        num_groups: an old form of `groups`.
        groups: checked, and without effect: all gradients of a step are passed in one call.
        process_set: the ranks whose gradients are averaged. Other ranks apply their own.
        scale_local_gradients: whether gradients of local variables are divided by the number of ranks.

    Raises:
        ArgumentError, UsageError: an argument has a value that it cannot have.
    """
    check_optimizer(optimizer)
    factor = _accumulate(optimizer, backward_passes_per_step, average_aggregated_gradients)
    averaging = _averaging_of_backend()(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        predivide=gradient_predivide_factor,
        groups=groups if groups is not None else num_groups or None,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )

    def average(gradients: Sequence[Any], variables: Sequence[Any] | None) -> list[Any]:
        averages = averaging.average(gradients, optimizer._trainable_variables if variables is None else variables)
        return averages if factor == 1 else [None if each is None else each * factor for each in averages]

    object.__setattr__(optimizer, "register_local_var", averaging.add_local)

    def verify_shared(variables: list[Any]) -> None:
        if process_set.included():
            with job.communicator(process_set) as comm:
                verify(comm, [variable for variable in variables if not averaging.is_local(variable)])

    return distribute(optimizer, average, verify_shared)


def PartialDistributedOptimizer(  # noqa: N802  (the name of Horovod)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = NoneCompressor,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a `DistributedOptimizer` that leaves the gradients of `local_layers`, one or many, as they are."""
    distributed = DistributedOptimizer(
        optimizer,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in weights_of(local_layers):
        distributed.register_local_var(variable)
    return distributed


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = NoneCompressor,
    legacy_opts: bool = False,
) -> Any:
    """Return a model that has been saved; its optimizer, with its state, averages gradients over ranks.

    Args:
        filepath: the file, which every rank reads.
        custom_optimizers: classes of optimizers that Keras does not have.
        custom_objects: further classes and functions of the model, by name.
        compression: as in `DistributedOptimizer`.
        legacy_opts: must be False, because Keras 3 has no legacy optimizers.
    """
    if legacy_opts:
        raise ArgumentError("Keras 3 has no legacy optimizers: leave legacy_opts out")
    named = {each.__name__: each for each in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**named, **(custom_objects or {})})
    if model.optimizer is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model


def _averaging_of_backend() -> Any:
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from unisono.compat.horovod.tensorflow.averaging import OfTensorFlow

        return OfTensorFlow
    if backend not in ("torch", "jax"):
        raise ArgumentError(f"gradients are not averaged on the backend {backend!r}: set KERAS_BACKEND to another one")
    from unisono.compat.horovod.keras.averaging import OfKeras

    return OfKeras


def _accumulate(optimizer: Any, passes: int, averages: bool) -> int:
    """Let an optimizer accumulate gradients; return the factor that makes the sum of the mean that Keras applies."""
    check_passes(passes)
    if passes == 1:
        return 1
    if optimizer.built:
        raise ArgumentError("backward_passes_per_step must be set before the optimizer has made a step")
    optimizer.gradient_accumulation_steps = passes
    return 1 if averages else passes
