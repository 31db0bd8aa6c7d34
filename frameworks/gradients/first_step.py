"""The first training step of a reducer: it records gradients, and the ranks agree on them when the step ends."""

from __future__ import annotations

from typing import Any, NamedTuple

from unisono import Communicator, UnisonoError
from unisono.frameworks.arrays import FlatArray, checksum
from unisono.frameworks.gradients import agreement, intake
from unisono.frameworks.gradients.agreement import Complaint
from unisono.frameworks.gradients.compression import check_compressible
from unisono.frameworks.gradients.layout import Gradient
from unisono.frameworks.gradients.on_device import (
    GradientMemory,
    check_compressible_on_device,
)
from unisono.frameworks.gradients.settings import Settings
from unisono.frameworks.gradients.step_memory import StepMemory


class _Recorded(NamedTuple):
    """A gradient of the first step, and the checksum of its elements at the time when it was passed.

    Nothing is reduced before the first step ends, so the checksum detects every change to an array of any library. A
    program that clips gradients too early mostly does so in its first step.
    """

    lent: FlatArray
    checksum: int

    def changed(self) -> bool:
        """Return whether the program has changed the elements since it passed them."""
        return (self.lent.changed is not None and self.lent.changed()) or _checksum(self.lent) != self.checksum


def _checksum(lent: FlatArray) -> int:
    """Return the checksum of the elements; 0 on a device, where a checksum would wait for it."""
    return checksum(lent.flat) if lent.streams is None else 0


class FirstStep:
    """The gradients that this rank has passed in the first step, and its first error."""

    def __init__(self, where: GradientMemory) -> None:
        self._where = where
        self._recorded: dict[str, _Recorded] = {}
        self._complaint: Complaint | None = None

    def record(self, name: str, array: Any) -> None:
        """Record a gradient. An error is kept as the complaint of this rank and not raised."""
        if name in self._recorded:
            self.complain(agreement.given_twice(name))
            return
        try:
            lent = self._where.flatten(array, name)
        except UnisonoError as error:
            self.complain(Complaint("UsageError", error.message))
        else:
            self._recorded[name] = _Recorded(lent, _checksum(lent))

    def complain(self, complaint: Complaint) -> None:
        """Keep the complaint if it is the first."""
        self._complaint = self._complaint or complaint

    def agree(self, world: Communicator, settings: Settings) -> tuple[Gradient, ...]:
        """Return the gradients of all ranks, as `agreement.agree` does. All ranks call it.

        Raises:
            MismatchError: the ranks differ in their gradients or settings.
            UsageError: a rank complains, no rank has a gradient, or one cannot be compressed.
        """
        changed = (agreement.changed(name) for name, recorded in self._recorded.items() if recorded.changed())
        own = [
            Gradient(name, recorded.lent.shape, recorded.lent.flat.dtype.name)
            for name, recorded in self._recorded.items()
        ]
        complaint = self._complaint or next(changed, None)
        settings = settings._replace(memory=self._where.name())
        gradients = agreement.agree(world, settings, own, complaint, zeros=settings.missing == "zero")
        if settings.compression is not None:
            check = check_compressible if self._where.workspace is None else check_compressible_on_device
            check(gradients, settings.compression)
        return gradients

    def copy_to(self, memory: StepMemory, *, check_finite: bool) -> None:
        """Copy the recorded gradients to their slots."""
        for name, recorded in self._recorded.items():
            memory.put(name, recorded.lent)
            if check_finite:
                intake.complain_if_not_finite(memory, name, recorded.lent)
