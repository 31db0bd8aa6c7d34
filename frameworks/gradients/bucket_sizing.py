"""How large buckets should be, so that as little communication as can be is left when the last gradient is there.

Large buckets use a link well, but the last one begins late; of small ones, each costs its latency, and the program some
time of its core. The time of a bucket is the tuner's prediction, scaled by what buckets have taken in steps that were
measured, so that a link slower than the tuner knows, or one that is shared, is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from unisono.frameworks.gradients.layout import Filling, Layout
from unisono.frameworks.gradients.timeline import Step

# What one more bucket costs the program beside its own time, hidden or not: the start, and the core for those who wake.
# Two ranks of one core each, over TCP, took 25 µs of CPU time more for each on one processor, 100 to 300 on another.
_OVERHEAD_S = 100e-6
_SIZES = [1 << power for power in range(15, 27)]  # 32 KiB to 64 MiB


def exposed_s(buckets: Sequence[Filling], backward_s: float, cost_s: Callable[[int], float]) -> float:
    """Return by how much a step is longer than backward.

    That is how long after the last gradient the last bucket ends, and what all of them cost the program.

    Args:
        buckets: in the order in which they become ready.
        backward_s: the time from the first gradient to the last.
        cost_s: seconds that a bucket of so many bytes takes; buckets are reduced one after the other.
    """
    end = 0.0
    for nbytes, share in buckets:
        end = max(end, backward_s * share) + cost_s(nbytes)
    return end - backward_s + len(buckets) * _OVERHEAD_S


def best_size(cut: Callable[[int], Sequence[Filling]], backward_s: float, cost_s: Callable[[int], float]) -> int:
    """Return the number of bytes for a bucket that leaves the least exposed; the larger one, if two do.

    ``cut(nbytes)`` returns the buckets into which gradients are cut if they are to be of about so many bytes.
    """
    return min(reversed(_SIZES), key=lambda size: exposed_s(cut(size), backward_s, cost_s))


class Pace(NamedTuple):
    """How fast steps are.

    Attributes:
        backward_s: the time from the first gradient to the last.
        scale: how many times as long as the tuner predicts a bucket takes.
    """

    backward_s: float
    scale: float


def pace_of(steps: Sequence[Step], layout: Layout, predicted_s: Callable[[int, str], float]) -> Pace:
    """Return the pace of the best of some steps; `predicted_s(nbytes, dtype)` is the tuner's."""
    predicted = sum(predicted_s(bucket.nbytes, bucket.dtype) for bucket in layout.buckets)
    scale = min(step.communication_s for step in steps) / predicted if predicted else 1.0
    return Pace(min(step.ready_s - step.begin_s for step in steps), scale)
