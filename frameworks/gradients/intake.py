"""Taking in a gradient: it is copied to its slot in the step memory, or its error becomes a complaint."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono import UnisonoError
from unisono.frameworks.arrays import FlatArray
from unisono.frameworks.gradients import agreement
from unisono.frameworks.gradients.agreement import Complaint
from unisono.frameworks.gradients.layout import Gradient
from unisono.frameworks.gradients.on_device import GradientMemory
from unisono.frameworks.gradients.step_memory import StepMemory


def take(
    memory: StepMemory, name: str, array: Any, where: GradientMemory, *, check_finite: bool, takes_new: bool
) -> bool:
    """Copy a gradient to its slot, or record its error in the step memory.

    Args:
        memory: the memory of the step.
        name: the name of the gradient.
        array: the gradient.
        where: where gradients are.
        check_finite: whether a gradient that is not finite is an error.
        takes_new: whether a gradient without a slot is a new gradient; otherwise it is an error.

    Returns:
        Whether the gradient is in its slot now.
    """
    try:
        lent = where.flatten(array, name)
    except UnisonoError as error:
        memory.complain(Complaint("UsageError", error.message))
        return False
    if check_finite:
        complain_if_not_finite(memory, name, lent)
    slot = memory.shaped.get(name)
    if name in memory.received or name in memory.new:
        memory.complain(agreement.given_twice(name))
    elif slot is None and takes_new:
        memory.note_new(name, lent)
    elif slot is None or lent.shape != slot.shape or lent.flat.dtype != slot.dtype:
        memory.complain(_misfit(memory, Gradient(name, lent.shape, lent.flat.dtype.name)))
    else:
        memory.put(name, lent)
        return True
    return False


def complain_of_changes(memory: StepMemory) -> None:
    """Complain of each gradient that the program has changed after passing it, if its library counts writes."""
    for gradients in (memory.received, memory.new):
        for name, lent in gradients.items():
            if lent.changed is not None and lent.changed():
                memory.complain(agreement.changed(name))


def _misfit(memory: StepMemory, gradient: Gradient) -> Complaint:
    """Return the complaint of a gradient that the layout lacks, or that has another shape or dtype there."""
    expected = memory.layout.gradients.get(gradient.name)
    if expected is None:
        text = (
            f"{gradient.name!r} is not among the gradients of the first step: with a lag, call flush() and reset() on "
            "all ranks before a step with other gradients"
        )
    else:
        text = f"{agreement.described(gradient)}, and was {agreement.dtype_and_shape(expected)} in the first step"
    return Complaint("UsageError", text)


def complain_if_not_finite(memory: StepMemory, name: str, lent: FlatArray) -> None:
    """Complain of a gradient with an element that is infinite or not a number. On a device none is looked at."""
    flat = lent.flat
    if lent.streams is not None:
        text = f"{name!r} is on a GPU, where check_finite=True is not possible: check the results of finish()"
        memory.complain(Complaint("UsageError", text))
    elif flat.dtype.kind not in "biu" and not np.isfinite(flat).all():
        memory.complain(Complaint("NotFiniteError", f"the gradient of {name!r} is not finite"))
