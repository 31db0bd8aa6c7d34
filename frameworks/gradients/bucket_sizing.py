"""The size of buckets that leaves the least communication after the last gradient.

Large buckets use a link well, but the last bucket starts late. Small buckets start early, but each costs its latency
and some time of the program's core. The time of a bucket is the prediction of the tuner, times a scale from measured
steps. The scale corrects for a link that is slower than the tuner assumes, or that others use too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from unisono.frameworks.gradients.layout import Filling, Layout
from unisono.frameworks.gradients.timeline import Step

# The CPU time that one more bucket costs the program, even if its communication is hidden: starting it, and waking the
# threads that carry it. Two ranks of one core each, over TCP, took 25 µs more per bucket on one processor, and 100 to
# 300 µs on another.
_OVERHEAD_S = 100e-6
_SIZES = [1 << power for power in range(15, 27)]  # 32 KiB to 64 MiB


def exposed_s(buckets: Sequence[Filling], backward_s: float, cost_s: Callable[[int], float]) -> float:
    """Return how many seconds a training step takes longer than its backward.

    This is the time from the last gradient to the end of the last bucket, plus the overhead of all buckets.

    Args:
        buckets: the buckets, in the order in which they become ready.
        backward_s: the time from the first gradient to the last, in seconds.
        cost_s: ``cost_s(nbytes)`` is the time of a bucket in seconds; buckets are reduced one after the other.
    """
    end = 0.0
    for nbytes, share in buckets:
        end = max(end, backward_s * share) + cost_s(nbytes)
    return end - backward_s + len(buckets) * _OVERHEAD_S


def best_size(cut: Callable[[int], Sequence[Filling]], backward_s: float, cost_s: Callable[[int], float]) -> int:
    """Return the size of buckets, in bytes, with the smallest `exposed_s`; of two equally good sizes, the larger one.

    ``cut(nbytes)`` returns the buckets of about `nbytes` bytes into which the gradients are cut.
    """
    return min(reversed(_SIZES), key=lambda size: exposed_s(cut(size), backward_s, cost_s))


class Pace(NamedTuple):
    """How fast training steps are: the time of backward, and the speed of reductions.

    Attributes:
        backward_s: the time from the first gradient to the last, in seconds.
        scale: the measured time of buckets divided by the time that the tuner predicts.
    """

    backward_s: float
    scale: float


def pace_of(steps: Sequence[Step], layout: Layout, predicted_s: Callable[[int, str], float]) -> Pace:
    """Return the smallest times of `steps`; ``predicted_s(nbytes, dtype)`` is the time that the tuner predicts."""
    predicted = sum(predicted_s(bucket.nbytes, bucket.dtype) for bucket in layout.buckets)
    scale = min(step.communication_s for step in steps) / predicted if predicted else 1.0
    return Pace(min(step.ready_s - step.begin_s for step in steps), scale)
