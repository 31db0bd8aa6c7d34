"""Simulates training steps of data-parallel training: overlap of computing and reducing, slow ranks, late gradients.

In a training step, a rank computes forward, then backward. During the backward pass its buckets of gradients become
ready one after the other. A bucket is reduced when it is ready on all ranks of the group and the bucket before it has
been reduced.

A rank starts a training step when its own last one has ended and the gradients of `lag` + 1 training steps ago have
been reduced. So a reduction during computing costs nothing. With a lag, waiting for a rank that was late once costs
nothing either.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from unisono.errors import UsageError
from unisono.tuning.machine.topology import Floats


class TrainingForecast(NamedTuple):
    """The training that is simulated.

    Attributes:
        compute_s: seconds of a training step of one rank alone: forward, backward and update.
        buckets_s: seconds of the collective of each bucket, in the order in which they become ready.
        backward: the part of a training step, at its end, during which gradients become ready.
        overlap: whether each bucket is reduced when it becomes ready, not only when all are.
        spread: standard deviation of the logarithm of a step's time, from rank to rank and step to step.
        slow: the part of ranks that are always slow, and the factor by which they are.
        lag: the number of training steps by which gradients may come late.
        groups: the number of groups of ranks, each of which reduces by itself.
    """

    compute_s: float
    buckets_s: tuple[float, ...]
    backward: float = 2 / 3
    overlap: bool = True
    spread: float = 0.0
    slow: tuple[float, float] = (0.0, 1.0)
    lag: int = 0
    groups: int = 1


class Trained(NamedTuple):
    """The result: mean seconds of a training step, over steps and groups, and the part of them that ranks compute."""

    step_s: float
    efficiency: float


def simulate_training(training: TrainingForecast, size: int, steps: int = 50, seed: int = 0) -> Trained:
    """Return the speed at which `size` ranks train; the same seed gives the same times of all ranks.

    Raises:
        UsageError: times are negative, or the ranks cannot be divided equally among the groups.
    """
    is_negative = min(training.compute_s, training.spread, training.lag, *training.buckets_s) < 0
    if is_negative or steps < 1 or training.groups < 1 or size < 1 or size % training.groups:
        raise UsageError(
            f"cannot simulate {steps} steps of {training} on {size} ranks: no time may be "
            "negative, all numbers are 1 or more, and the ranks must divide equally among the groups"
        )
    shape = (training.groups, size // training.groups)
    chance = np.random.default_rng(seed)
    usual = np.ones(size)
    usual[: round(training.slow[0] * size)] = training.slow[1]
    factor: Floats = chance.permutation(usual).reshape(shape)
    # The time at which each rank ended its own step, and at which each group had reduced the gradients of the last
    # ones.
    free_s: Floats = np.zeros(shape)
    never: Floats = np.zeros(training.groups)
    reduced_s = [never] * (training.lag + 1)
    for _ in range(steps):
        noise = np.exp(training.spread * chance.standard_normal(shape) - training.spread**2 / 2)
        taken_s = training.compute_s * factor * noise
        start_s = np.maximum(free_s, reduced_s[0][:, None])
        free_s = np.add(start_s, taken_s)
        reduced_s = [*reduced_s[1:], _reduced(training, start_s, taken_s, reduced_s[-1])]
    end_s = np.maximum(free_s.max(axis=1), reduced_s[-1])
    step_s = float(end_s.mean()) / steps
    return Trained(step_s, training.compute_s / step_s if step_s else 1.0)


def _reduced(training: TrainingForecast, start_s: Floats, taken_s: Floats, link_s: Floats) -> Floats:
    """Return when each group has reduced the buckets of a training step, if the first could start at `link_s`."""
    number = len(training.buckets_s)
    for at, bucket_s in enumerate(training.buckets_s, start=1):
        part = 1 - training.backward * (1 - at / number) if training.overlap else 1.0
        link_s = np.maximum(link_s, (start_s + part * taken_s).max(axis=1)) + bucket_s
    return link_s
