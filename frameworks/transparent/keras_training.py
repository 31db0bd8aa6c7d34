"""Models of Keras train on the share of this rank of the samples, with averaged gradients."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from unisono.frameworks.transparent.changes import Changes

# Callbacks that write files, by name, because some need packages that may not be installed.
_WRITERS = ("CSVLogger", "ModelCheckpoint", "TensorBoard")
_SAMPLES = ("x", "y", "sample_weight")


def change(changes: Changes, keras: Any) -> None:
    """Change `compile`, `fit` and the methods of `keras.Model` that write files."""
    from unisono.frameworks.keras.callbacks import BroadcastVariables, MetricAverage
    from unisono.frameworks.keras.optimizer import DistributedOptimizer
    from unisono.frameworks.keras.trainable import averages_gradients

    world = changes.world
    keras.utils.set_random_seed(random.randrange(1 << 31))  # all ranks draw the same number

    def compiling(original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def compile_model(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if self.optimizer is not None and not averages_gradients(self.optimizer):
                DistributedOptimizer(self.optimizer, world)
                changes.note(
                    f"{type(self.optimizer).__name__} averages gradients over {world.size} ranks; the learning rate "
                    "is not scaled"
                )

        return compile_model

    def fitting(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @wraps(original)
        def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(self, *args, **kwargs)
            _share(changes, keras, bound.arguments)
            own = _callbacks_of_rank(changes, bound.arguments.get("callbacks"))
            bound.arguments["callbacks"] = [BroadcastVariables(comm=world), MetricAverage(comm=world), *own]
            if world.rank:
                bound.arguments["verbose"] = 0
            changes.has_training = changes.is_in_fit = True
            try:
                history = original(*bound.args, **bound.kwargs)
            finally:
                changes.is_in_fit = False
            world.barrier()  # rank 0 has written its files
            return history

        return fit

    def saving(original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def save(*args: Any, **kwargs: Any) -> None:
            if changes.is_in_fit:  # a callback, which only rank 0 has
                original(*args, **kwargs)
                return
            changes.note(f"{original.__name__} writes on rank 0 alone, and the other ranks wait for it")
            changes.on_rank_0(partial(original, *args, **kwargs))

        return save

    changes.replace(keras.Model, "compile", compiling)
    changes.replace(keras.Model, "fit", fitting)
    for name in ("save", "save_weights", "export"):
        changes.replace(keras.Model, name, saving)


def _share(changes: Changes, keras: Any, arguments: dict[str, Any]) -> None:
    """Change the arguments of `fit` so that this rank trains on its share of the samples."""
    rank, size = changes.world.rank, changes.world.size
    x: Any = arguments.get("x")
    if isinstance(x, (list, tuple, dict)) or (hasattr(x, "shape") and hasattr(x, "__getitem__")):
        samples = [arguments[name] for name in _SAMPLES if arguments.get(name) is not None]
        lengths = {len(array) for array in keras.tree.flatten(samples)}
        if len(lengths) != 1:
            return  # Keras raises an error
        (count,) = lengths
        used = count - count % size
        for name in _SAMPLES:
            if arguments.get(name) is not None:
                arguments[name] = keras.tree.map_structure(lambda array: array[rank:used:size], arguments[name])
        unit = f"{used} samples" if used == count else f"{used} of {count} samples, so that all shares are equal"
    elif hasattr(x, "shard") and hasattr(x, "cardinality"):
        known = _known(int(x.cardinality()))
        _check_length(changes, known, arguments, "use dataset.apply(tf.data.experimental.assert_cardinality(n))")
        arguments["x"] = x.shard(size, rank) if known is None else x.shard(size, rank).take(known // size)
        unit = _batches(known, size)
    elif isinstance(x, keras.utils.PyDataset):
        from unisono.frameworks.transparent.keras_batches import ShareOfBatches

        known = x.num_batches
        _check_length(changes, known, arguments, "give the dataset a length")
        arguments["x"] = ShareOfBatches(x, rank, size)
        unit = _batches(known, size)
    elif hasattr(x, "batch_sampler"):  # a DataLoader, which was changed when it was made, if it shuffles
        if not changes.has_shares:
            changes.note("warning: fit reads all samples on each rank, because the DataLoader does not shuffle")
        return
    else:
        raise changes.refused(
            f"fit takes samples of type {type(x).__name__}, which cannot be shared: pass arrays, a tf.data.Dataset, a "
            "PyDataset or a DataLoader"
        )
    changes.has_shares = True
    changes.note(f"fit gives each of {size} ranks its share of {unit}; weights are copied from rank 0")


def _known(cardinality: int) -> int | None:
    """Return a number of batches, or None if TensorFlow does not know it, which has negative numbers for that."""
    return cardinality if cardinality >= 0 else None


def _check_length(changes: Changes, count: int | None, arguments: dict[str, Any], way: str) -> None:
    """Check that all ranks end an epoch after the same batch; raises `UsageError`, which names a `way` to do so."""
    if count is None and arguments.get("steps_per_epoch") is None:
        raise changes.refused(
            "its dataset has no known length, so the ranks would end at different times: pass steps_per_epoch, or "
            + way
        )


def _batches(count: int | None, size: int) -> str:
    return "the batches" if count is None else f"{count // size * size} batches"


def _callbacks_of_rank(changes: Changes, callbacks: Any) -> list[Any]:
    """Return the callbacks without those that write files, except on rank 0."""
    listed = [] if callbacks is None else callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    if any(type(callback).__name__ == "BackupAndRestore" for callback in listed):
        raise changes.refused(
            "the callback BackupAndRestore would restore another epoch on each rank: use ModelCheckpoint, and load its "
            "file before fit"
        )
    return [callback for callback in listed if changes.world.rank == 0 or type(callback).__name__ not in _WRITERS]
