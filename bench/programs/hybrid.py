"""Measures hybrid groups next to synchronous training with a straggler: ``unisono bench hybrid [--json]``.

A small numpy network learns scikit-learn's digits. A training step of a rank takes `--step-ms` (computing, then
sleeping), and that of the last rank takes `--slow` times as long. In every round, one training has all ranks in step
and one has groups. Both end after the same number of images.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import unisono as un
from unisono.bench import argument_types
from unisono.data_parallel import HybridGroups, ShardedSampler, average_metrics, broadcast_parameters
from unisono.foundation.program import begin

Array = NDArray[np.float64]

_HIDDEN, _CLASSES = 64, 10
_TEST_IMAGES, _TRAINING_IMAGES = 360, 1437
_LEARNING_RATE, _MOMENTUM = 0.05, 0.9
_COLUMNS = ("images_per_s", "accuracy", "images", "seconds")


class _HybridSettings(NamedTuple):
    """The settings of all ranks."""

    batch: int
    images: int
    step_s: float
    slow: float
    groups: int
    staleness: int


def main() -> None:
    """Measure hybrid groups and synchronous training with a straggler, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", "--ranks", type=argument_types.count, default=4)
    parser.add_argument("--groups", type=argument_types.count, default=2)
    parser.add_argument("--staleness", type=int, default=8)
    parser.add_argument("--slow", type=float, default=3.0, help="how many times longer the last rank takes")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--batch", type=argument_types.count, default=16, help="images of a rank in a step")
    parser.add_argument("--epochs", type=float, default=12.0)
    parser.add_argument("--rounds", type=argument_types.count, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    images, step_s = round(options.epochs * _TRAINING_IMAGES), options.step_ms / 1e3
    setup = _HybridSettings(options.batch, images, step_s, options.slow, options.groups, options.staleness)
    row = measure(options.ranks, setup, options.rounds)
    if options.json:
        sys.stdout.write(json.dumps(row) + "\n")
        return
    sys.stdout.write(f"{'':>12}" + "".join(f"{name:>14}" for name in _COLUMNS) + "\n")
    for name in ("synchronous", "hybrid"):
        sys.stdout.write(f"{name:>12}" + "".join(f"{row[name][column]:>14.3f}" for column in _COLUMNS) + "\n")
    sys.stdout.write(f"hybrid / synchronous: {row['ratio']:.2f} times the images per second\n")


def measure(ranks: int, setup: _HybridSettings, rounds: int) -> dict[str, Any]:
    """Return medians over rounds of both ways, the ratio of their images per second, and the settings."""
    from rich.console import Console
    from rich.progress import track

    data = _digits()
    ways: dict[str, Callable[..., dict[str, float]]] = {"synchronous": _in_step, "hybrid": _in_groups}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    console = Console(stderr=True)
    for name in track([*ways] * rounds, "training", console=console, transient=True):
        results[name].append(un.launch(ways[name], ranks, setup, data)[0])
    row: dict[str, Any] = {
        name: {column: median(one[column] for one in of_way) for column in _COLUMNS} for name, of_way in results.items()
    }
    ratio = row["hybrid"]["images_per_s"] / row["synchronous"]["images_per_s"]
    return {"ranks": ranks, **setup._asdict(), "rounds": rounds, **row, "ratio": ratio}


def _digits() -> tuple[Array, NDArray[np.int64]]:
    """Return images as rows of grey values from 0 to 1, and the digit on each, in a random order."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    return data.data[order] / 16.0, data.target[order]


class _Trainer:
    """A network, its gradient on this rank's images, and the optimizer's velocity."""

    def __init__(self, world: un.Communicator, sampler: ShardedSampler, setup: _HybridSettings, data: Any) -> None:
        random = np.random.default_rng(world.rank)
        self.model: dict[str, Array] = {
            "hidden.weight": random.normal(scale=0.18, size=(64, _HIDDEN)),
            "hidden.bias": np.zeros(_HIDDEN),
            "out.weight": random.normal(scale=0.18, size=(_HIDDEN, _CLASSES)),
            "out.bias": np.zeros(_CLASSES),
        }
        broadcast_parameters(world, self.model)
        self._velocity = [np.zeros_like(x) for x in self.model.values()]
        self._world, self._sampler, self._indices = world, sampler, iter(sampler)
        self._setup, (self._pixels, self._digits) = setup, data
        self._step_s = setup.step_s * (setup.slow if world.rank == world.size - 1 else 1.0)

    def step(self, group: un.Communicator) -> None:
        """Take a training step with the mean gradient over the ranks of `group`."""
        began = time.perf_counter()
        gradients = self._gradients([self._next() for _ in range(self._setup.batch)])
        time.sleep(max(0.0, self._step_s - (time.perf_counter() - began)))
        group.allreduce(gradients, "avg", out=gradients)
        for x, velocity, gradient in zip(self.model.values(), self._velocity, gradients, strict=True):
            velocity[...] = _MOMENTUM * velocity - _LEARNING_RATE * gradient
            np.add(x, velocity, out=x)

    def result(self, began: float, images: int) -> dict[str, float]:
        """Return the row of a training that began at `began` and has used `images` images."""
        self._world.barrier()
        seconds = time.perf_counter() - began
        share = slice(self._world.rank, _TEST_IMAGES, self._world.size)
        _, scores = self._forward(self._pixels[share])
        right = float((scores.argmax(1) == self._digits[share]).mean())
        row = {"images_per_s": images / seconds, "accuracy": right, "images": images, "seconds": seconds}
        return {**row, **average_metrics(self._world, {"accuracy": right}, samples=len(scores))}

    def _next(self) -> int:
        index = next(self._indices, None)
        if index is None:
            self._indices = iter(self._sampler)
            index = next(self._indices)
        return _TEST_IMAGES + index

    def _forward(self, pixels: Array) -> tuple[Array, Array]:
        weight, bias, out_weight, out_bias = self.model.values()
        hidden = np.maximum(pixels @ weight + bias, 0.0)
        return hidden, hidden @ out_weight + out_bias

    def _gradients(self, chosen: list[int]) -> list[Array]:
        pixels = self._pixels[chosen]
        hidden, scores = self._forward(pixels)
        error = np.exp(scores - scores.max(1, keepdims=True))
        error /= error.sum(1, keepdims=True)
        error[np.arange(len(chosen)), self._digits[chosen]] -= 1.0
        error /= len(chosen)
        hidden_error = (error @ self.model["out.weight"].T) * (hidden > 0.0)
        return [pixels.T @ hidden_error, hidden_error.sum(0), hidden.T @ error, error.sum(0)]


def _in_step(world: un.Communicator, setup: _HybridSettings, data: Any) -> dict[str, float]:
    """Train with all ranks in step."""
    trainer = _Trainer(world, ShardedSampler(_TRAINING_IMAGES, world.rank, world.size), setup, data)
    steps = -(-setup.images // (setup.batch * world.size))
    world.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        trainer.step(world)
    return trainer.result(began, steps * setup.batch * world.size)


def _in_groups(world: un.Communicator, setup: _HybridSettings, data: Any) -> dict[str, float]:
    """Train in groups. Each group takes its images from all images."""
    index, size = divmod(world.rank * setup.groups, world.size)[0], world.size // setup.groups
    sampler = ShardedSampler(_TRAINING_IMAGES, world.rank % size, size, seed=index)
    trainer = _Trainer(world, sampler, setup, data)
    contributions = -(-setup.images // (setup.batch * size))
    with HybridGroups(world, trainer.model, groups=setup.groups, staleness=setup.staleness) as hybrid:
        began = time.perf_counter()
        # Each group makes one more contribution when it finishes.
        while hybrid.contributions < contributions - setup.groups:
            trainer.step(hybrid.group)
            hybrid.exchange(trainer.model)
        trainer.step(hybrid.group)
        hybrid.finish(trainer.model)
        return trainer.result(began, hybrid.contributions * setup.batch * size)


if __name__ == "__main__":
    begin()
    main()
