"""A training script of Horovod for Keras. Only its import is changed, and it reaches the losses of a single process.

    KERAS_BACKEND=tensorflow unisono run -n 2 examples/horovod_keras.py      (or torch, or jax)

Each rank trains on its part of each batch, and the optimizer averages the gradients.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import unisono.compat.horovod.keras as hvd  # was: import horovod.keras as hvd

SAMPLES, BATCH, EPOCHS = 512, 64, 6


def losses(rank: int, size: int, *callbacks: Any) -> list[float]:
    """Return the loss of each epoch, where each of `size` ranks trains on its part of the samples."""
    random = np.random.default_rng(0)
    x = random.standard_normal((SAMPLES, 8)).astype("float32")
    y = (x[:, :4] ** 2).sum(1, keepdims=True) - (x[:, 4:] ** 2).sum(1, keepdims=True)

    keras.utils.set_random_seed(rank)  # the weights of rank 0 count
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.01)
    if size > 1:
        optimizer = hvd.DistributedOptimizer(optimizer)
    model.compile(optimizer, loss="mean_squared_error")
    history = model.fit(
        x[rank::size],
        y[rank::size],
        batch_size=BATCH // size,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    return [float(loss) for loss in history.history["loss"]]


def main() -> None:
    """Train on all ranks, and on rank 0 alone."""
    hvd.init()
    callbacks = hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()
    together = losses(hvd.rank(), hvd.size(), *callbacks)
    if hvd.rank() == 0:
        alone = losses(0, 1)
        print(
            f"{keras.backend.backend()}, {hvd.size()} ranks: loss {together[0]:.4f} to {together[-1]:.4f}; "
            f"one process: {alone[-1]:.4f}"
        )
        if not np.allclose(together, alone, rtol=1e-3):
            raise SystemExit("the losses differ")
    hvd.shutdown()


if __name__ == "__main__":
    main()
