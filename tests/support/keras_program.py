"""Trains by Keras on all ranks, and checks losses, callbacks and errors; prints what is wrong.

Arguments: a folder for files, and "unisono" or "horovod" for the interface to check.
"""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

import unisono as un
import unisono.compat.horovod.keras as hvd
import unisono.keras as uk

FOLDER, INTERFACE = Path(sys.argv[1]), sys.argv[2]
EXAMPLE = Path(__file__).parents[2] / "examples" / "keras_fit.py"
HOROVOD_EXAMPLE = EXAMPLE.with_name("horovod_keras.py")
STEPS = 4

world = un.init()
random = np.random.default_rng(world.rank)
x, y = (random.standard_normal((8 * STEPS, columns)).astype("float32") for columns in (3, 1))


def expect(name: str, result: Any, expected: Any) -> None:
    if not np.allclose(result, expected, rtol=1e-4):
        print(f"{name}: {result} instead of {expected}")


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


def losses_of(example: Path) -> Callable[..., Any]:
    """Return the function `losses` of an example, which trains for four steps then."""
    losses: Callable[..., Any] = runpy.run_path(str(example))["losses"]
    losses.__globals__.update(SAMPLES=128, BATCH=64, EPOCHS=2)
    return losses


def example() -> None:
    losses = losses_of(EXAMPLE)
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
    rising = [0.1 * (1 + (step + 1) / STEPS / 2) / 2 for step in range(2 * STEPS)]
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
    words = "takes no lag" if keras.backend.backend() == "jax" else "lag=1 cannot be used"
    refused("a lag", un.UsageError, words, lambda: uk.DistributedOptimizer(keras.optimizers.SGD(), lag=1))
    different = compiled(units=1 + world.rank)
    refused("different models", un.MismatchError, "on rank 1", lambda: fitted(different, uk.BroadcastVariables()))


def step_of(optimizer: Any, *callbacks: Any) -> float:
    """Return the change of a weight, whose gradient is 1 + rank, in a step of `fit`."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(optimizer, loss=lambda target, output: output * (1.0 + world.rank))
    copy = uk.BroadcastVariables()
    copy.set_model(model)
    copy.on_train_begin()
    before = float(model.get_weights()[0][0, 0])
    model.fit(np.ones((1, 1)), np.ones((1, 1)), verbose=0, callbacks=list(callbacks))
    return before - float(model.get_weights()[0][0, 0])


class Drift(keras.callbacks.Callback):  # type: ignore[misc]
    """Changes a weight on rank 1."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if world.rank == 1:
            self.model.weights[0].assign(self.model.weights[0] + 1)


def loss_scaling() -> None:
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    expect("a scaled step", step_of(uk.DistributedOptimizer(scaled), uk.BroadcastVariables()), 1.5)
    inside = keras.optimizers.LossScaleOptimizer(uk.DistributedOptimizer(keras.optimizers.SGD(1.0)))
    refused("an inner optimizer", un.UsageError, "pass the LossScaleOptimizer", lambda: step_of(inside))
    refused("one around another", un.UsageError, "already", lambda: uk.DistributedOptimizer(inside))


def drift() -> None:
    for callback in (uk.BroadcastVariables(), hvd.callbacks.BroadcastGlobalVariablesCallback(0)):
        if isinstance(callback, uk.BroadcastVariables):
            optimizer = uk.DistributedOptimizer(keras.optimizers.SGD(1.0))
        else:
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        words = "after the first epoch, the parameters are not the same on all ranks: 'variable 0 (kernel)'"
        refused("a drift", un.MismatchError, words, lambda: step_of(optimizer, Drift(), callback))  # noqa: B023


def momentum() -> None:
    """Halve the rate, with a sum of changes that is 1."""
    model = compiled()
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    for corrects, expected in ((True, 0.5), (False, 1.0)):
        optimizer.learning_rate = 0.1
        optimizer.momentums[0].assign(np.ones((3, 1)))
        schedule = uk.LearningRateSchedule(0.1, lambda epoch: 0.5**epoch, momentum_correction=corrects)
        schedule.set_model(model)
        schedule.on_epoch_begin(1)
        expect("momentum", optimizer.momentums[0].numpy(), np.full((3, 1), expected))


def horovod() -> None:
    hvd.init(comm=world)
    losses = losses_of(HOROVOD_EXAMPLE)
    callbacks = hvd.callbacks
    broadcast, average = callbacks.BroadcastGlobalVariablesCallback(0), callbacks.MetricAverageCallback()
    together = losses(world.rank, world.size, broadcast, average)
    if world.rank == 0:
        expect("losses of Horovod", together, losses(0, 1))
    expect("allreduce", hvd.allreduce(1.0 + world.rank, op=hvd.Sum), 3.0)
    expect("half", hvd.allreduce([1.0 + world.rank], compression=hvd.Compression.fp16), [1.5])
    expect("allgather", hvd.allgather(np.full(world.rank, 2.0)), [2.0])
    expect("broadcast", hvd.broadcast([world.rank], 1), [1])
    expect("reducescatter", hvd.reducescatter(np.ones(2), op=hvd.Sum), [2.0])
    scaled = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0)), op=hvd.Sum)
    expect("a scaled step of Horovod", step_of(scaled, callbacks.BroadcastGlobalVariablesCallback(0)), 3.0)
    drift()

    # One gradient of 1 + rank in each of two passes, without a local layer and with one.
    keras.utils.set_random_seed(0)
    layer, own = keras.layers.Dense(1, use_bias=False), keras.layers.Dense(1, use_bias=False)
    inputs = keras.Input((1,))
    model = keras.Model(inputs, layer(inputs) + own(inputs))
    before = [float(weight.numpy()[0, 0]) for weight in model.weights]
    sgd = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), gradient_predivide_factor=2.0, local_layers=own)
    model.compile(sgd, loss=lambda target, output: output * (1.0 + world.rank))
    rates = callbacks.LearningRateScheduleCallback(1.0, 0.5), callbacks.LearningRateWarmupCallback(1.0, 1, verbose=1)
    model.fit(np.ones((1, 1)), np.ones((1, 1)), verbose=0)
    changes = [old - float(weights.numpy()[0, 0]) for old, weights in zip(before, model.weights, strict=True)]
    expect("a step", changes, [1.5, (1.0 + world.rank) / 2])
    result = model.fit(np.ones((1, 1)), np.ones((1, 1)), epochs=2, verbose=0, callbacks=[rates[0]]).history["lr"]
    expect("rates", result, [1.0, 0.5])
    checkpoint = callbacks.BestModelCheckpoint(monitor="loss", save_weights_only=True)
    refused("a path", un.UsageError, "has no path", lambda: fitted(model, checkpoint))
    checkpoint.filepath = str(FOLDER / f"best{world.rank}.weights.h5")
    model.fit(np.ones((1, 1)), np.ones((1, 1)), verbose=0, callbacks=[checkpoint])
    expect("best weights", (FOLDER / f"best{world.rank}.weights.h5").exists(), world.rank == 0)

    passes = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    model.compile(passes, loss=lambda target, output: output * (1.0 + world.rank))
    state = hvd.elastic.KerasState(model, epoch=world.rank)
    state.sync()
    before = model.get_weights()[0][0, 0]
    commit, note = hvd.elastic.CommitStateCallback(state, 2), hvd.elastic.UpdateEpochStateCallback(state)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        model.fit(np.ones((2, 1)), np.ones((2, 1)), batch_size=1, verbose=0, callbacks=[rates[1], note, commit])
    expect("the end of a warmup", "warmup has ended with the learning rate 1\n" in printed.getvalue(), world.rank == 0)
    after = model.get_weights()[0][0, 0]
    expect("two passes", before - after, 3.0)
    model.layers[1].kernel.assign([[9.0]])
    state.epoch = 5
    state.restore()
    expect("a restored state", [model.get_weights()[0][0, 0], state.epoch], [after, 1])
    hvd.shutdown()


PARTS = {"unisono": (example, callbacks, momentum, loss_scaling, errors), "horovod": (horovod,)}
for part in PARTS[INTERFACE]:
    part()
sys.stdout.write("all was checked\n")  # at once, because the ranks share the output
sys.stdout.flush()
world.close()
