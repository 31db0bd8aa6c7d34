"""How far apart two cores are at this moment.

On a virtual machine the hypervisor moves virtual cores between physical ones. Two cores are sometimes under one
last-level cache and seconds later they are not, which changes the time of a small collective several times over; or
they are two threads of one core, which tell each other something sooner, and do the work of one. No other number tells.
Hence the latency of a flag between the two cores is measured around every round, and only rounds of one placement are
compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from unisono.transports import _core

# One way: 25 to 32 ns between threads of one core; between cores of a processor with several last-level caches, 38 to
# 65 under one, about 200 not. Each label is of what lasts less than so many nanoseconds.
LABELS = {"core": 35.0, "near": 120.0, "far": math.inf}
FLAG_ROUNDS = 2000
# What may be asked for.
PLACEMENTS = ("any", *LABELS)
REPEATS = 3


class Placement(NamedTuple):
    """What was measured between the cores of the first two ranks.

    Attributes:
        label: "core" for threads of one core, "near", "far", or "unknown" where there are not two cores to measure.
        latency_ns: one-way latency of a flag in nanoseconds; None if unknown.
    """

    label: str
    latency_ns: float | None


UNKNOWN = Placement("unknown", None)


def measure(cores: Sequence[int]) -> Placement:
    """Measure between the first two of `cores`, while nothing else of ours runs; takes about a millisecond."""
    if len(set(cores[:2])) < 2:
        return UNKNOWN
    latency_ns = min(_core.flag_latency_ns(cores[0], cores[1], FLAG_ROUNDS) for _ in range(REPEATS))
    return Placement(label(latency_ns), latency_ns)


def label(latency_ns: float) -> str:
    """Return what cores are called between which a flag takes so long.

    >>> [label(ns) for ns in (26.0, 50.0, 210.0)]
    ['core', 'near', 'far']
    """
    return next(name for name, below_ns in LABELS.items() if latency_ns < below_ns)
