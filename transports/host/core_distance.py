"""Measures how far apart two cores are at this moment, by the latency of a flag between them.

On a virtual machine the hypervisor moves virtual cores between physical ones. Two cores may share a last-level cache
and seconds later not, which changes the time of a small collective several times over. Or they may be two threads of
one core, which exchange a flag sooner but do the work of one core. No other number shows this. So benchmarks measure
the latency around every round, and compare only rounds of one placement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from unisono.transports import _core

# One-way latency below which a placement has the label, in nanoseconds. Measured: 25 to 32 between threads of one core;
# on a processor with several last-level caches, 38 to 65 between cores of one cache, and about 200 between caches.
LABELS = {"core": 35.0, "near": 120.0, "far": math.inf}
FLAG_ROUNDS = 2000
# The placements that a benchmark can request.
PLACEMENTS = ("any", *LABELS)
REPEATS = 3


class CorePlacement(NamedTuple):
    """The distance between the cores of the first two ranks.

    Attributes:
        label: "core" for threads of one core, "near", "far", or "unknown" without two cores to measure.
        latency_ns: one-way latency of a flag in nanoseconds; None if unknown.
    """

    label: str
    latency_ns: float | None


UNKNOWN = CorePlacement("unknown", None)


def measure(cores: Sequence[int]) -> CorePlacement:
    """Return the placement of the first two of `cores`. It takes about a millisecond, in which no rank may compute."""
    if len(set(cores[:2])) < 2:
        return UNKNOWN
    latency_ns = min(_core.flag_latency_ns(cores[0], cores[1], FLAG_ROUNDS) for _ in range(REPEATS))
    return CorePlacement(label(latency_ns), latency_ns)


def label(latency_ns: float) -> str:
    """Return the label of a one-way latency.

    >>> [label(ns) for ns in (26.0, 50.0, 210.0)]
    ['core', 'near', 'far']
    """
    return next(name for name, below_ns in LABELS.items() if latency_ns < below_ns)
