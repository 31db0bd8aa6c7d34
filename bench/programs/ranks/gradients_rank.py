"""One rank of `unisono.bench.programs.gradients`: trains in several ways, in turns, and prints the times.

Run by path with a `_GradientsRequest` as JSON. Unisono's variables say which rank this is.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import unisono as un

PR_SET_PDEATHSIG = 1
_WARM_UPS = 8
_CLASSES = 10
_TEST_IMAGES = 360
_LEARNING_RATE, _MOMENTUM = 0.02, 0.9

Array = NDArray[np.float32]
Ready = Callable[[str, Any], None]


class _GradientsRequest(NamedTuple):
    """The experiment to run (`what`: "overlap" with a model, or "lag"), its rounds and sizes, and the ways to train.

    `ways` has the arguments of `GradientReducer` for each way. In the way "after" of "overlap", the rank passes all
    gradients to the reducer after the last one has been computed. A training step of "lag" takes at least `step_s`: the
    rank sleeps after computing, as it would while an accelerator computes.
    """

    what: str
    model: str
    rounds: int
    width: int
    batch: int
    ways: dict[str, dict[str, Any]]
    step_s: float = 0.0


class Digits:
    """A numpy network on scikit-learn's digits, whose gradients become ready from the last layer to the first."""

    def __init__(self, width: int, batch: int, rank: int, size: int, hidden: int = 2) -> None:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]

        pixels, digits = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(digits))
        pixels, digits = (pixels[order] / 16).astype(np.float32), digits[order]
        self.train = pixels[_TEST_IMAGES:], digits[_TEST_IMAGES:]
        self.test = pixels[:_TEST_IMAGES], digits[:_TEST_IMAGES]
        if batch > len(self.train[1]):
            raise un.UsageError(f"a batch of digits has at most {len(self.train[1])} images, not {batch}")
        random = np.random.default_rng(1)
        widths = [64, *[width] * hidden, _CLASSES]
        self.weights = {
            f"layer{k}": random.normal(scale=(2 / n) ** 0.5, size=(n, m)).astype(np.float32)
            for k, (n, m) in enumerate(pairwise(widths))
        }
        self._random, self._batch, self._share = np.random.default_rng(2), batch, slice(rank, None, size)

    def backward(self, ready: Ready) -> None:
        """Compute the gradients on this rank's part of the next batch, and pass each to `ready` with its name."""
        chosen = self._random.choice(len(self.train[1]), self._batch, replace=False)[self._share]
        x, y = self.train[0][chosen], self.train[1][chosen]
        inputs, error = self._forward(x)
        error = np.exp(error - error.max(axis=1, keepdims=True))
        error /= error.sum(axis=1, keepdims=True)
        error[np.arange(len(y)), y] -= 1
        error /= len(y)
        for k in reversed(range(len(inputs))):
            ready(f"layer{k}", inputs[k].T @ error)
            error = (error @ self.weights[f"layer{k}"].T) * (inputs[k] > 0)

    def accuracy(self) -> float:
        """Return the part of the test images that the network classifies correctly."""
        return float((self._forward(self.test[0])[1].argmax(axis=1) == self.test[1]).mean())

    def _forward(self, x: Array) -> tuple[list[Array], Array]:
        inputs = [x]
        for k in range(len(self.weights)):
            x = x @ self.weights[f"layer{k}"]
            if k + 1 < len(self.weights):
                x = np.maximum(x, 0)
                inputs.append(x)
        return inputs, x


class Transformer:
    """A small transformer of torch; `batch` is the number of sequences of 64 tokens on all ranks together."""

    def __init__(self, width: int, batch: int, rank: int, size: int) -> None:
        import torch

        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(width, 4, dim_feedforward=4 * width, dropout=0.0, batch_first=True)
        self._model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self._x = torch.randn(batch // size, 64, width)
        self._ready: Ready = lambda name, gradient: None
        for name, parameter in self._model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda of_it, name=name: self._ready(name, of_it.grad))

    def backward(self, ready: Ready) -> None:
        """Compute the gradients of this rank's part of a batch, and pass each to `ready` with its name."""
        self._ready = ready
        self._model.zero_grad()
        self._model(self._x).square().mean().backward()


MODELS: dict[str, Callable[..., Any]] = {"digits": partial(Digits, hidden=4), "transformer": Transformer}


def overlap(world: un.Communicator, request: _GradientsRequest) -> dict[str, Any]:
    """Return the times of training steps in each way, on the slowest rank, and the reports of the reducers.

    `ms` are medians. `exposed_ms` are medians of a difference: the time of a training step minus the time of the one
    without communication in the same round.
    """
    model = MODELS[request.model](request.width, request.batch, world.rank, world.size)
    reducers = {name: un.GradientReducer(world, **arguments) for name, arguments in request.ways.items()}
    held: list[tuple[str, Any]] = []

    def alone() -> None:
        held.clear()
        model.backward(lambda name, gradient: held.append((name, gradient)))

    def after(reducer: un.GradientReducer) -> None:
        alone()
        for name, gradient in held:
            reducer.ready(name, gradient)
        reducer.finish()

    def overlapped(reducer: un.GradientReducer) -> None:
        model.backward(reducer.ready)
        reducer.finish()

    steps: dict[str, Callable[[], None]] = {"alone": alone}
    steps |= {name: partial(after if name == "after" else overlapped, each) for name, each in reducers.items()}
    taken: dict[str, list[float]] = {name: [] for name in steps}
    turns = random.Random(0)  # the same on all ranks; turns are shuffled because a step leaves data in the caches
    for _ in range(_WARM_UPS + request.rounds):
        for name in turns.sample(list(steps), len(steps)):
            world.barrier()
            began = time.perf_counter()
            steps[name]()
            taken[name].append(1e3 * (time.perf_counter() - began))
    slowest = world.allreduce(np.array([times[_WARM_UPS:] for times in taken.values()]), "max")
    by_way = dict(zip(taken, slowest, strict=True))
    reports = {name: reducer.report() for name, reducer in reducers.items()}
    for reducer in reducers.values():
        reducer.close()
    return {
        "ms": {name: float(median(times)) for name, times in by_way.items()},
        "exposed_ms": {name: float(median(by_way[name] - by_way["alone"])) for name in reducers},
        "waited_ms": {name: 1e3 * report.exposed_s for name, report in reports.items()},
        "nbytes": reports["after"].nbytes,
        "buckets": {name: len(report.buckets) for name, report in reports.items()},
        "sent_nbytes": {name: report.sent_nbytes for name, report in reports.items()},
    }


def lag(world: un.Communicator, request: _GradientsRequest) -> dict[str, Any]:
    """Return the training steps per second of each way of training on the digits, and the final accuracy.

    The speed is the median over the middle half of the training steps, after the warm-up and before the cool-down.
    """
    results: dict[str, Any] = {}
    for name, arguments in request.ways.items():
        model = Digits(request.width, request.batch, world.rank, world.size)
        velocity = {each: np.zeros_like(weights) for each, weights in model.weights.items()}

        def apply(gradients: Mapping[str, Any], model: Digits = model, velocity: dict[str, Array] = velocity) -> None:
            for layer, gradient in gradients.items():
                velocity[layer] *= _MOMENTUM
                velocity[layer] -= _LEARNING_RATE * gradient
                model.weights[layer] += velocity[layer]

        alone = arguments.get("alone")
        with un.GradientReducer(world, **{key: value for key, value in arguments.items() if key != "alone"}) as reducer:
            gradients: dict[str, Any] = {}
            ends = []
            for _ in range(request.rounds):
                until = time.perf_counter() + request.step_s
                gradients.clear()
                model.backward(gradients.__setitem__ if alone else reducer.ready)
                time.sleep(max(0.0, until - time.perf_counter()))
                apply(gradients if alone else reducer.finish())
                ends.append(time.perf_counter())
            for flushed in reducer.flush():
                apply(flushed)
        taken = np.diff(ends)[request.rounds // 4 : -request.rounds // 4]
        results[name] = {"steps_per_s": 1 / float(median(taken)), "accuracy": model.accuracy()}
    return results


def main() -> None:
    """Run the experiment that the request names, `overlap` or `lag`. Rank 0 prints its times as JSON."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    request = _GradientsRequest(*json.loads(sys.argv[1]))
    world = un.init()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    result = {"overlap": overlap, "lag": lag}[request.what](world, request)
    if world.rank == 0:
        sys.stdout.write(json.dumps(result))
    world.close()


if __name__ == "__main__":
    try:
        main()
    except un.UsageError as error:
        sys.exit(f"unisono: {error}")
