"""The numbers of a benchmark: medians, percentiles, bus bandwidth as nccl-tests defines it, and paired ratios."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]

RESAMPLES = 2000
CONFIDENCE = 0.95

# By collective, the factor from algorithm bandwidth to bus bandwidth for p ranks, as in nccl-tests, doc/PERFORMANCE.md.
# Bus bandwidth is comparable with the speed of the hardware for any p. It is None if the collective moves no data.
BUS_FACTORS: dict[str, Callable[[int], float] | None] = {
    "allreduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "reduce": lambda ranks: 1.0,
    "broadcast": lambda ranks: 1.0,
    "scan": lambda ranks: 1.0,
    "gather": lambda ranks: (ranks - 1) / ranks,
    "scatter": lambda ranks: (ranks - 1) / ranks,
    "allgather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "alltoall": lambda ranks: (ranks - 1) / ranks,
    "barrier": None,
}


class Ratio(NamedTuple):
    """A ratio of times and the bounds of its 95 % confidence interval (all three equal for a single round)."""

    value: float
    low: float
    high: float


def usual_s(times_s: Sequence[float]) -> float:
    """Return the usual time: the mean of the middle half, so that few disturbed times do not count."""
    trimmed = round(len(times_s) / 4)
    return float(np.mean(sorted(times_s)[trimmed : len(times_s) - trimmed]))


def slowest(times_of_ranks: Sequence[Sequence[int]]) -> Times:
    """Return the time of each call in microseconds: the maximum over ranks, given their times in nanoseconds."""
    return np.asarray(np.max(np.asarray(times_of_ranks, dtype=np.float64), axis=0) / 1e3)


def median(rounds: Sequence[Times]) -> float:
    """Return the median over rounds of the median over calls, so that one disturbed round changes little."""
    return float(np.median([np.median(times) for times in rounds]))


def p90(rounds: Sequence[Times]) -> float:
    """Return the median over rounds of the 90th percentile of a round's calls, so that it is never below `median`."""
    return float(np.median([np.percentile(times, 90) for times in rounds]))


def bus_bandwidth(collective: str, nbytes: int, ranks: int, time_us: float) -> float | None:
    """Return busbw in 1e9 bytes per second; None for a collective that moves no data."""
    factor = BUS_FACTORS[collective]
    return None if factor is None else factor(ranks) * nbytes / time_us / 1e3


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Return the geometric mean of the ratios of the pairs, with its bootstrap confidence interval.

    The i-th numerator and denominator must come from the same round, so that a disturbance of the round cancels out.
    The resampling is seeded, so equal inputs give equal bounds.
    """
    logarithms = np.log(numerators) - np.log(denominators)
    resampled = np.random.default_rng(0).choice(logarithms, (RESAMPLES, logarithms.size)).mean(axis=1)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(resampled, (tail, 100 - tail))
    return Ratio(*(float(np.exp(value)) for value in (logarithms.mean(), low, high)))
