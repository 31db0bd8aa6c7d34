"""How far apart two cores are at this moment.

On a virtual machine the hypervisor moves virtual cores between physical ones. Two cores are sometimes under one
last-level cache and seconds later they are not, which changes the time of a small collective several times over; no
other number tells. Hence the latency of a flag between the two cores is measured around every round, and only rounds
of one placement are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unisono.transports import _core

# One way, between two cores of a processor with several last-level caches: about 50 ns under one, about 200 ns not.
NEAR_BELOW_NS = 120.0
FLAG_ROUNDS = 2000
# What may be asked for, as labels of placements.
PLACEMENTS = ("any", "near", "far")
REPEATS = 3


class Placement(NamedTuple):
    """What was measured between the cores of the first two ranks.

    Attributes:
        label: "near", "far", or "unknown" where there are not two cores to measure.
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
    return Placement("near" if latency_ns < NEAR_BELOW_NS else "far", latency_ns)
