"""What rank 0 finds out in steps that are over, for all to adopt: the order of gradients, and how buckets are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from unisono.frameworks.gradients.bucket_sizing import Pace, best_size
from unisono.frameworks.gradients.layout import Filling, Gradient, Layout, layout_of
from unisono.frameworks.gradients.priorities import turns_of


class Findings(NamedTuple):
    """What all ranks are to adopt.

    Attributes:
        names: the gradients that come first, in this order; none if the order that there is will do.
        bucket_nbytes: about the size of a bucket.
        turns: the indices of the buckets, in the order in which they should be started.
    """

    names: tuple[str, ...]
    bucket_nbytes: int
    turns: tuple[int, ...]


def reordered(layout: Layout, names: Sequence[str]) -> list[Gradient]:
    """Return the gradients of a layout, those of some names first."""
    return [layout.gradients[name] for name in dict.fromkeys((*names, *layout.gradients))]


def findings(
    layout: Layout,
    names: tuple[str, ...],
    bucket_nbytes: int | None,
    pace: Pace,
    predicted_s: Callable[[int, str], float],
    *,
    priorities: bool,
) -> Findings:
    """Return what steps of a pace have told.

    Args:
        layout: of those steps.
        names: the gradients that should come first.
        bucket_nbytes: about the size of a bucket; None if it is to be found out.
        pace: of the steps.
        predicted_s: ``predicted_s(nbytes, dtype)`` is how long the tuner expects a bucket to take.
        priorities: whether buckets that are needed first go first.
    """
    dtype = max(layout.lengths, key=lambda name: layout.lengths[name])

    def cost_s(nbytes: int) -> float:
        return pace.scale * predicted_s(nbytes, dtype)

    gradients = reordered(layout, names)

    def cut(nbytes: int) -> list[Filling]:
        return layout_of(gradients, nbytes).fillings()

    size = best_size(cut, pace.backward_s, cost_s) if bucket_nbytes is None else bucket_nbytes
    buckets = cut(size)
    turns = turns_of(buckets, pace.backward_s, cost_s) if priorities else tuple(range(len(buckets)))
    return Findings(names, size, turns)
