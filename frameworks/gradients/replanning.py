"""Replanning: rank 0 changes the order, the size and the start order of buckets, and all ranks adopt the change.

Rank 0 decides, because each rank sees other times. It decides after a step in two cases: gradients have become ready in
another order several times in a row, or the times of the measured steps are complete.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from unisono import Communicator
from unisono.frameworks.gradients.agreement import Flags
from unisono.frameworks.gradients.bucket_comms import BucketComms
from unisono.frameworks.gradients.bucket_sizing import Pace, best_size, pace_of
from unisono.frameworks.gradients.layout import Filling, Gradient, Layout, layout_of
from unisono.frameworks.gradients.priorities import start_order_of
from unisono.frameworks.gradients.ready_order import ReadyOrder
from unisono.frameworks.gradients.settings import Settings
from unisono.frameworks.gradients.step_memory import StepMemory, StepMemoryPool
from unisono.frameworks.gradients.timeline import Timeline

_FIRST_BUCKET_NBYTES = 1 << 20
# A call on a device costs the host tens of microseconds, and this size takes a link of 100 GB/s ten times as long.
_DEVICE_BUCKET_NBYTES = 32 << 20
_MEASURED_STEPS = 5


class Replan(NamedTuple):
    """The decision of rank 0, which all ranks adopt.

    Attributes:
        names: the gradients that come first, in this order; empty if the present order stays.
        bucket_nbytes: the approximate size of a bucket.
        start_order: the indices of the buckets, in the order in which they are started.
    """

    names: tuple[str, ...]
    bucket_nbytes: int
    start_order: tuple[int, ...]


class Replanner:
    """Decides when and how the buckets change, and makes the pool of the new layout.

    Args:
        world: the ranks.
        settings: the settings of the reducer.
        comms: the bucket communicators, which know how long the tuner expects a bucket to take.
        timeline: the times of the last steps.

    Attributes:
        bucket_nbytes: the approximate size of a bucket at present.
        is_on_device: whether gradients are on a device. Their times are unknown to the host, so no step is measured.
        measured_steps: the numbers of the training steps whose times decide about the buckets.
        last_measured_step: the last of them, after which all ranks replan; None if there is none.
    """

    is_on_device = False

    def __init__(self, world: Communicator, settings: Settings, comms: BucketComms, timeline: Timeline) -> None:
        self._world, self._settings, self._comms, self._timeline = world, settings, comms, timeline
        self.reset(0)

    def reset(self, step: int) -> None:
        """Start again without a layout, before training step `step`."""
        first_nbytes = _DEVICE_BUCKET_NBYTES if self.is_on_device else _FIRST_BUCKET_NBYTES
        self.bucket_nbytes = self._settings.bucket_nbytes or first_nbytes
        self._pace = Pace(1.0, 0.0)  # a scale of 0: until steps have been measured, no bucket waits for the link
        self.start_again(step)

    def restore(self, bucket_nbytes: int) -> None:
        """Use the size of buckets of a saved state, and measure no further training steps."""
        self.bucket_nbytes = bucket_nbytes
        self._measure(range(0))

    def start_again(self, step: int) -> None:
        """Forget the recorded order, and measure the steps after training step `step`, which may open connections."""
        measures = not self.is_on_device and (self._settings.bucket_nbytes is None or self._settings.priorities)
        self._measure(range(step + 1, step + 1 + _MEASURED_STEPS) if measures else range(0))
        self._order = ReadyOrder()

    def _measure(self, steps: range) -> None:
        self.measured_steps = steps
        self.last_measured_step = steps[-1] if steps else None

    def sees_other_order(self, memory: StepMemory) -> bool:
        """Record on rank 0 in which order gradients became ready; return whether to adopt another order."""
        return self._world.rank == 0 and self._order.see(memory.full, tuple(memory.received))

    def replanned(self, pool: StepMemoryPool, memory: StepMemory, flags: Flags) -> StepMemoryPool:
        """Return the pool to use after the training step of `memory`: `pool` itself, or a pool with other buckets.

        All ranks call it for the same step. They communicate only if the step is the last measured one, or if rank 0
        has seen another order.
        """
        has_measured = memory.step.number == self.last_measured_step
        if not has_measured and not (flags and flags & Flags.OTHER_ORDER):
            return pool
        replan: Replan = self._world.broadcast_object(
            self._decide(pool, has_measured=has_measured) if self._world.rank == 0 else None
        )
        if not replan.names and replan[1:] == (self.bucket_nbytes, pool.start_order):
            return pool
        self.bucket_nbytes, self._order = replan.bucket_nbytes, ReadyOrder()
        gradients = reordered(pool.layout, replan.names)
        return pool.with_layout(gradients, replan.bucket_nbytes, replan.start_order)

    def _decide(self, pool: StepMemoryPool, *, has_measured: bool) -> Replan:
        steps = self._timeline.of(self.measured_steps, pool.layout.buckets) if has_measured else []
        # A prediction takes 0.2 ms, and thousands of buckets have the same few sizes.
        predicted_s = functools.cache(self._comms.predicted_s)
        if steps:
            self._pace = pace_of(steps, pool.layout, predicted_s)
        return replan_of(
            pool.layout,
            self._order.proposed,
            None if steps and self._settings.bucket_nbytes is None else self.bucket_nbytes,
            self._pace,
            predicted_s,
            priorities=self._settings.priorities,
        )


def reordered(layout: Layout, names: Sequence[str]) -> list[Gradient]:
    """Return the gradients of a layout: first those in `names`, then the others in their order."""
    return [layout.gradients[name] for name in dict.fromkeys((*names, *layout.gradients))]


def replan_of(
    layout: Layout,
    names: tuple[str, ...],
    bucket_nbytes: int | None,
    pace: Pace,
    predicted_s: Callable[[int, str], float],
    *,
    priorities: bool,
) -> Replan:
    """Return the buckets with which training steps of this pace should be shortest.

    Args:
        layout: the present layout.
        names: the gradients that come first.
        bucket_nbytes: the approximate size of a bucket; None to choose the best one.
        pace: the pace of the measured steps.
        predicted_s: ``predicted_s(nbytes, dtype)`` is the time that the tuner predicts for a bucket.
        priorities: whether the buckets that the next forward needs first are started first.
    """
    dtype = max(layout.lengths, key=lambda name: layout.lengths[name])

    def cost_s(nbytes: int) -> float:
        return pace.scale * predicted_s(nbytes, dtype)

    gradients = reordered(layout, names)

    def cut(nbytes: int) -> list[Filling]:
        return layout_of(gradients, nbytes).fillings()

    size = best_size(cut, pace.backward_s, cost_s) if bucket_nbytes is None else bucket_nbytes
    buckets = cut(size)
    start_order = start_order_of(buckets, pace.backward_s, cost_s) if priorities else tuple(range(len(buckets)))
    return Replan(names, size, start_order)
