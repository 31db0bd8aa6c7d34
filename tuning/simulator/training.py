"""Steps of data-parallel training, simulated: computing and reducing that overlap, slow ranks, late gradients.

In a step, a rank goes forward, then backward, and its buckets of gradients become ready one after the other on the way
back. A bucket is reduced when all ranks of the group have it ready and the bucket before has been reduced. A rank
starts a step when it has ended its own last one, and when the gradients of `lag` + 1 steps ago have been reduced. So
what is reduced while others compute costs nothing, and with lag neither does waiting for who was late once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from unisono.errors import UsageError
from unisono.tuning.machine.topology import Floats


class Training(NamedTuple):
    """What is trained.

    Attributes:
        compute_s: seconds of a step of a rank alone: forward, backward and update.
        buckets_s: seconds of the collective of each bucket, in the order in which they become ready.
        backward: the part of a step on which gradients become ready, at its end.
        overlap: whether buckets are reduced as they become ready; otherwise when all are.
        spread: standard deviation of the logarithm of the time of a step, from rank to rank and step to step.
        slow: the part of ranks that are always slow, and by what factor.
        lag: by how many steps gradients may come late.
        groups: into how many groups ranks are divided; each reduces by itself.
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
    """What came of it: seconds of a step, on average over steps and groups, and the part of them that ranks compute."""

    step_s: float
    efficiency: float


def simulate_training(training: Training, size: int, steps: int = 50, seed: int = 0) -> Trained:
    """Return how fast `size` ranks train; the same seed gives the same times of all ranks.

    Raises:
        UsageError: times are negative, or ranks cannot be divided into so many groups.
    """
    wrong = min(training.compute_s, training.spread, training.lag, *training.buckets_s) < 0
    if wrong or steps < 1 or training.groups < 1 or size < 1 or size % training.groups:
        raise UsageError(f"cannot simulate {steps} steps of {training} on {size} ranks")
    shape = (training.groups, size // training.groups)
    chance = np.random.default_rng(seed)
    usual = np.ones(size)
    usual[: round(training.slow[0] * size)] = training.slow[1]
    factor: Floats = chance.permutation(usual).reshape(shape)
    # When each rank has ended its own step, and when each group had reduced the gradients of the last ones.
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


def _reduced(training: Training, start_s: Floats, taken_s: Floats, link_s: Floats) -> Floats:
    """Return when each group has reduced the buckets of a step, if it could start with the first one at `link_s`."""
    number = len(training.buckets_s)
    for at, bucket_s in enumerate(training.buckets_s, start=1):
        part = 1 - training.backward * (1 - at / number) if training.overlap else 1.0
        link_s = np.maximum(link_s, (start_s + part * taken_s).max(axis=1)) + bucket_s
    return link_s
