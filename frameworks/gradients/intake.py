"""What a rank gives to a step: each gradient goes to its slot, or what is wrong with it becomes a complaint."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from unisono import UnisonoError
from unisono.frameworks.arrays import Array, FlatArray, checksum, flatten
from unisono.frameworks.gradients import agreement
from unisono.frameworks.gradients.agreement import Complaint
from unisono.frameworks.gradients.layout import Gradient
from unisono.frameworks.gradients.memory import Memory


class Noted(NamedTuple):
    """A gradient of the first step, and the checksum of its elements when it was given.

    Nothing is reduced before the first step ends, so the checksum finds every change, of arrays of any library. A
    program that clips too early mostly does so in its first step.
    """

    lent: FlatArray
    checksum: int

    def changed(self) -> bool:
        """Return whether the program has changed it since."""
        return self.lent.changed() or checksum(self.lent.flat) != self.checksum


def note(array: Any, name: str) -> Noted:
    """Return a gradient of the first step; raises `UsageError` if it is no array."""
    lent = flatten(array, f"the gradient {name!r}")
    return Noted(lent, checksum(lent.flat))


def take(memory: Memory, name: str, array: Any, *, check_finite: bool, takes_new: bool) -> bool:
    """Copy a gradient to its slot, or let the memory remember what is wrong with it.

    Args:
        memory: of the step.
        name: of the gradient.
        array: the gradient.
        check_finite: whether one that is not finite is wrong.
        takes_new: whether one that has no slot is a new gradient, and not a mistake.

    Returns:
        Whether it is in its slot now.
    """
    try:
        lent = flatten(array, f"the gradient {name!r}")
    except UnisonoError as error:
        memory.complain(Complaint("UsageError", error.message))
        return False
    if check_finite:
        complain_if_not_finite(memory, name, lent.flat)
    slot = memory.shaped.get(name)
    if name in memory.given or name in memory.new:
        memory.complain(agreement.given_twice(name))
    elif slot is None and takes_new:
        memory.note_new(name, lent)
    elif slot is None or lent.shape != slot.shape or lent.flat.dtype != slot.dtype:
        memory.complain(_misfit(memory, Gradient(name, lent.shape, lent.flat.dtype.name)))
    else:
        copy(memory, name, lent)
        return True
    return False


def copy(memory: Memory, name: str, lent: FlatArray) -> None:
    """Copy a gradient, which fits, to its slot."""
    memory.given[name] = lent
    slot = memory.flat[name]
    slot[...] = lent.flat  # of what lies there, numpy copies nothing


def complain_of_changes(memory: Memory) -> None:
    """Let the memory remember a gradient that the program has changed since it was given, if its library tells."""
    for gradients in (memory.given, memory.new):
        for name, lent in gradients.items():
            if lent.changed():
                memory.complain(agreement.changed(name))


def _misfit(memory: Memory, gradient: Gradient) -> Complaint:
    """Return what is wrong with a gradient that the layout does not have, or not of this shape and dtype."""
    expected = memory.layout.gradients.get(gradient.name)
    if expected is None:
        text = (
            f"{gradient.name!r} is not among the gradients of the first step: with a lag, call flush() and reset() on "
            "all ranks before a step that has others"
        )
    else:
        text = f"{agreement.described(gradient)}, and was {agreement.kind(expected)} in the first step"
    return Complaint("UsageError", text)


def complain_if_not_finite(memory: Memory, name: str, flat: Array) -> None:
    """Let the memory remember a gradient with an element that is infinite or not a number."""
    if flat.dtype.kind not in "biu" and not np.isfinite(flat).all():
        memory.complain(Complaint("NotFiniteError", f"the gradient of {name!r} is not finite"))
