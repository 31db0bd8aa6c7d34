"""Two ranks train by Keras with `DiLoCo`, each on samples of its own; the backend is that of the environment."""

from __future__ import annotations

import keras
import numpy as np

import unisono as un
import unisono.keras as uk
from unisono.data_parallel import fingerprint


def train(world: un.Communicator) -> tuple[str, int, float, float]:
    """Return a hash of the weights, the number of steps of the outer optimizer, and the losses before and after."""
    keras.utils.set_random_seed(7 + world.rank)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), loss="mean_squared_error")
    x = np.random.default_rng(world.rank).normal(size=(64, 4)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    before = float(model.evaluate(x, y, verbose=0))
    outer = uk.DiLoCo(comm=world, inner_steps=4, fragments=2, overlap=1, mixing=0.5)
    model.fit(x, y, batch_size=8, epochs=6, verbose=0, callbacks=[outer])
    after = float(model.evaluate(x, y, verbose=0))
    weights = {str(number): variable for number, variable in enumerate(model.trainable_variables)}
    assert outer.outer is not None
    return fingerprint(weights), outer.outer.steps, before, after


if __name__ == "__main__":
    (one, steps, before, after), (other, *_) = un.launch(train, 2, timeout_s=100)
    assert (one == other, steps) == (True, 48), (one, other, steps)
    assert after < before / 2, (before, after)
    print("all was checked")
