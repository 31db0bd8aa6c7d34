"""Fragments: the parts of the parameters that are averaged one after the other, and the schedule of their averages.

With `inner_steps` = 6, 3 fragments and an overlap of 1, fragment 0 leaves after steps 2, 8, 14, … and returns one step
later. Fragment 1 leaves after steps 4, 10, …, and fragment 2 after steps 6, 12, …
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unisono import UsageError
from unisono.frameworks.data_parallel.layers import Layer, spread


class FragmentSchedule(NamedTuple):
    """The schedule of fragments: the inner steps at which the average of each one starts and is applied.

    Steps are counted from 1.

    Attributes:
        inner_steps: the steps between two averages of a fragment.
        fragments: the number of fragments.
        overlap: the steps between the moment when a fragment leaves and the moment when its average is used.
    """

    inner_steps: int
    fragments: int
    overlap: int

    def leaving(self, step: int) -> int | None:
        """Return the index of the fragment that leaves after a step, or None. At most one does."""
        turn = (step - 1) % self.inner_steps + 1
        ends = [self.inner_steps * (index + 1) // self.fragments for index in range(self.fragments)]
        return ends.index(turn) if turn in ends else None


def check_schedule(schedule: FragmentSchedule, layers: Sequence[Layer]) -> None:
    """Check that a schedule is possible for these layers.

    Raises:
        UsageError: a number is no integer, or has a value that it cannot have.
    """
    for name, value, least in zip(schedule._fields, schedule, (1, 1, 0), strict=True):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"{name} must be an integer, {least} or more, not {value!r}")
    inner_steps, fragments, overlap = schedule
    if fragments > len(layers):
        raise UsageError(
            f"{fragments} fragments need as many layers, and the parameters have {len(layers)}: names that are equal "
            "up to the last dot form a layer"
        )
    if fragments > inner_steps:
        raise UsageError(f"{fragments} fragments need inner_steps={fragments} or more, not {inner_steps}")
    if overlap >= inner_steps:
        raise UsageError(
            f"overlap={overlap} must be below inner_steps={inner_steps}, because the average of a fragment must "
            "arrive before the fragment is averaged again"
        )


def fragments_of(layers: Sequence[Layer], count: int) -> tuple[Layer, ...]:
    """Return `count` fragments of about equal size. Each is a layer with the parts of one or more whole layers."""
    fragment_of = spread(layers, range(count))
    return tuple(
        _joined(index, [layer for layer, fragment in zip(layers, fragment_of, strict=True) if fragment == index])
        for index in range(count)
    )


def _joined(index: int, layers: Sequence[Layer]) -> Layer:
    dtype = "float64" if any(layer.dtype == "float64" for layer in layers) else "float32"
    return Layer(f"fragment {index}", tuple(part for layer in layers for part in layer.parts), dtype)
