"""Trains a small network by `model.fit` of Keras on all ranks, and compares the losses with those of one process.

KERAS_BACKEND=jax unisono run -n 2 examples/keras_fit.py      (or torch, or tensorflow)

Each rank trains on its part of each batch, and the optimizer averages the gradients, so the losses do not depend on the
number of ranks.
"""

from __future__ import annotations

import keras
import numpy as np

import unisono as un
import unisono.keras as uk

SAMPLES, BATCH, EPOCHS = 512, 64, 8


def losses(world: un.Communicator) -> list[float]:
    """Return the loss of each epoch, over the samples of all ranks."""
    random = np.random.default_rng(0)
    x = random.standard_normal((SAMPLES, 8)).astype("float32")
    y = (x[:, :4] ** 2).sum(1, keepdims=True) - (x[:, 4:] ** 2).sum(1, keepdims=True)

    keras.utils.set_random_seed(world.rank)  # the weights of rank 0 count
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)])
    model.compile(uk.DistributedOptimizer(keras.optimizers.Adam(0.01), world), loss="mean_squared_error")
    history = model.fit(
        x[world.rank :: world.size],
        y[world.rank :: world.size],
        batch_size=BATCH // world.size,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[uk.BroadcastVariables(comm=world), uk.MetricAverage(comm=world)],
    )
    return [float(loss) for loss in history.history["loss"]]


def main() -> None:
    """Train on all ranks, and on rank 0 alone."""
    with un.init() as world:
        together = losses(world)
        if world.rank == 0:
            alone = losses(world.subgroup([0]))
            print(
                f"{keras.backend.backend()}, {world.size} ranks: loss {together[0]:.4f} to {together[-1]:.4f}; "
                f"one process: {alone[-1]:.4f}"
            )
            if not np.allclose(together, alone, rtol=1e-3):
                raise SystemExit("the losses differ")
        world.barrier()


if __name__ == "__main__":
    main()
