"""Trains by Keras on all ranks, and checks losses, callbacks and errors; prints what is wrong."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

import unisono as un
import unisono.keras as uk

FOLDER = Path(sys.argv[1])
EXAMPLE = Path(__file__).parents[2] / "examples" / "keras_fit.py"
STEPS = 4

world = un.init()
random = np.random.default_rng(world.rank)
x, y = (random.standard_normal((8 * STEPS, columns)).astype("float32") for columns in (3, 1))


def expect(name: str, found: Any, expected: Any) -> None:
    if not np.allclose(found, expected, rtol=1e-4):
        print(f"{name}: {found} instead of {expected}")


def refused(name: str, error: type[Exception], words: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except error as raised:
        if words not in str(raised):
            print(f"{name}: {raised}")
    else:
        print(f"{name} is not refused")


def compiled(units: int = 1) -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units)])
    optimizer = uk.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9))
    model.compile(optimizer, loss="mean_squared_error")
    return model


def fitted(model: Any, *callbacks: Any, epochs: int = 1) -> Any:
    return model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, callbacks=list(callbacks))


class Rates(keras.callbacks.Callback):  # type: ignore[misc]
    """Notes the learning rate of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.noted.append(float(self.model.optimizer.learning_rate))


def example() -> None:
    losses = runpy.run_path(str(EXAMPLE))["losses"]
    together = losses(world)
    if world.rank == 0:
        expect("losses", together, losses(world.subgroup([0])))


def callbacks() -> None:
    model, rates = compiled(), Rates()
    path = FOLDER / f"{world.rank}.keras"
    warmup = uk.LearningRateWarmup(0.1, 2)
    history = fitted(
        model, uk.BroadcastVariables(1), uk.MetricAverage(), warmup, rates, uk.ModelCheckpoint(path), epochs=3
    ).history
    rising = [0.1 * (1 + step / STEPS / 2) / 2 for step in range(2 * STEPS)]
    expect("rates of a warmup", rates.noted, rising + STEPS * [0.1])
    for name, values in history.items():
        expect(f"history of {name}", *world.allgather(np.array([values])))
    expect("weights", *world.allgather(model.get_weights()[0][None]))
    expect("checkpoints", path.exists(), world.rank == 0)

    # The saved optimizer is that of Keras, with its state; it averages again if it is asked to.
    loaded = keras.models.load_model(FOLDER / "0.keras")
    expect("steps of the loaded optimizer", float(loaded.optimizer.iterations), 3 * STEPS)
    uk.DistributedOptimizer(loaded.optimizer)
    schedule = uk.LearningRateSchedule(0.01, lambda epoch: 0.5**epoch, 1)
    expect("rates of a schedule", fitted(loaded, schedule, epochs=3).history["learning_rate"], [0.1, 0.005, 0.0025])
    expect("weights after loading", *world.allgather(loaded.get_weights()[0][None]))


def errors() -> None:
    optimizer = compiled().optimizer
    refused("an optimizer again", un.UsageError, "already", lambda: uk.DistributedOptimizer(optimizer))
    refused("a name", un.UsageError, "must be an optimizer of Keras", lambda: uk.DistributedOptimizer("adam"))
    refused("comm", un.UsageError, "must be a Communicator", lambda: uk.MetricAverage(comm="world"))
    if keras.backend.backend() == "jax":
        plain = keras.optimizers.SGD()
        refused("options", un.UsageError, "takes no lag", lambda: uk.DistributedOptimizer(plain, lag=1))
    different = compiled(units=1 + world.rank)
    refused("different models", un.MismatchError, "on rank 1", lambda: fitted(different, uk.BroadcastVariables()))


for part in (example, callbacks, errors):
    part()
sys.stdout.write("all was checked\n")  # at once, because the ranks share the output
sys.stdout.flush()
world.close()
