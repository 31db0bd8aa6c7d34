"""The memory of gradients: that of a step, with the reductions of its buckets, and that of residuals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

import unisono
from unisono.frameworks.arrays import Array, FlatArray
from unisono.frameworks.gradients.agreement import Complaint, Flags
from unisono.frameworks.gradients.layout import Layout
from unisono.frameworks.gradients.timeline import Step
from unisono.frameworks.gradients.two_stage_reduction import Pending

# Below this, mapping memory costs more than it saves.
_LEAST_MAPPED_NBYTES = 100 << 10


class Slots:
    """Flat arrays of zeros for all gradients of a layout.

    Args:
        layout: where each gradient lies.
        make: returns an array of zeros of so many elements of a dtype.
        dtype: of all arrays; by default that of the gradients.

    Attributes:
        flat: the memory of each gradient, one-dimensional, by name.
        shaped: the same, in the shape of the gradient.
        buckets: that of each bucket.
    """

    def __init__(self, layout: Layout, make: Callable[[int, DTypeLike], Array], dtype: DTypeLike | None = None) -> None:
        arrays = {name: make(count, np.dtype(dtype or name)) for name, count in layout.lengths.items()}
        self.flat: Mapping[str, Array] = {
            name: arrays[gradient.dtype][layout.offsets[name] :][: gradient.elements]
            for name, gradient in layout.gradients.items()
        }
        self.shaped = {name: flat.reshape(layout.gradients[name].shape) for name, flat in self.flat.items()}
        self.buckets = [arrays[bucket.dtype][bucket.start : bucket.stop] for bucket in layout.buckets]

    def write(self, saved: Mapping[str, Array]) -> None:
        """Write to the memory of those gradients that are among `saved`."""
        for name, array in saved.items():
            if name in self.flat:
                self.flat[name][...] = array.reshape(-1)


def residuals(layout: Layout) -> Slots:
    """Return memory for what compression leaves of each gradient."""
    return Slots(layout, np.zeros, np.float32)


class Memory(Slots):
    """The memory of one step after the other.

    Args:
        layout: where each gradient lies.
        turns: the indices of the buckets, in the order in which they are started.
        reduction: ``reduction(index, memory)`` returns what starts to reduce the memory of the bucket of this index.

    Attributes:
        layout, turns: the same.
        buckets_of: the buckets in which each gradient lies, by name.
        starts: by bucket, what starts its reduction.
        flags: what this rank has to say about the step: `Flags`, and the checksum of its parameters and the complement
            of that. When `telling` has ended, these are joined by "bor" with those of the other ranks.
        works: by bucket, its reduction, in the order in which they were started.
        telling: the reduction of `flags`, once it has started.
        given: by name, what the user gave in this step.
        new: by name, what the user gave that has no place in the layout.
        lacking: by bucket, of how many gradients it waits.
        full: the buckets that wait for none, in the order in which they have become so.
        complaint: what is wrong on this rank in this step.
        step: the record of the step.
    """

    def __init__(
        self, layout: Layout, turns: Sequence[int], reduction: Callable[[int, Array], Callable[[], Pending]]
    ) -> None:
        super().__init__(layout, _zeros)
        self.layout, self.turns = layout, turns
        self.buckets_of = layout.buckets_of()
        self.starts = [reduction(index, memory) for index, memory in enumerate(self.buckets)]
        self.flags = np.zeros(3, np.int64)
        self.begin(Step(-1))

    def begin(self, step: Step) -> None:
        """Make ready for a step."""
        self.flags[:] = 0
        self.tell_checksum(0)
        self.works: dict[int, Pending] = {}
        self.telling: Pending | None = None
        self.given: dict[str, FlatArray] = {}
        self.new: dict[str, FlatArray] = {}
        self.lacking = [len(bucket.names) for bucket in self.layout.buckets]
        self.full: list[int] = []
        self.complaint: Complaint | None = None
        self.step = step

    def complain(self, complaint: Complaint) -> None:
        """Remember what is wrong, if it is the first."""
        self.complaint = self.complaint or complaint
        self.flags[0] |= Flags.COMPLAINT

    def fill(self, index: int, moment: float) -> bool:
        """Note that another gradient of a bucket is there, since this moment; return whether all of it is now."""
        self.lacking[index] -= 1
        self.step.spans[index].ready_s = moment
        if self.lacking[index]:
            return False
        self.full.append(index)
        return True

    def next(self) -> int | None:
        """Return the bucket whose turn it is to be started; None if all have been."""
        return self.turns[len(self.works)] if len(self.works) < len(self.turns) else None

    def wait(self, index: int) -> None:
        """Wait for the reduction of a bucket, which has been started; raises its error."""
        self.works[index].wait()
        self.step.spans[index].note_end()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all gradients: those of the layout in its order, and then those that were added."""
        return tuple(self.flat)

    def write_back(self, name: str, reduced: Array) -> Any:
        """Overwrite what was given of a name by what was reduced, and return that; a copy, if nothing was given."""
        its = self.given.get(name)
        return reduced.copy() if its is None else its.with_elements(reduced)

    def started(self) -> list[Pending]:
        """Return all that has been started in the step."""
        return [*self.works.values(), *([self.telling] if self.telling is not None else [])]

    def tell_checksum(self, value: int) -> None:
        """Let the other ranks compare a checksum of the parameters with their own."""
        self.flags[1:] = value, ~value

    def told(self) -> Flags:
        """Return what the ranks have to say, when `telling` has ended."""
        # A bit that two ranks do not share is set in both: in the checksums and in their complements.
        differ = Flags.PARAMETERS_DIFFER if self.flags[1] & self.flags[2] else Flags(0)
        return Flags(int(self.flags[0])) | differ

    def note_new(self, name: str, lent: FlatArray) -> None:
        """Remember a gradient that has no place in the layout, until the ranks know of it."""
        self.new[name] = lent
        self.flags[0] |= Flags.NEW_GRADIENT

    def add(self, name: str, reduced: Array) -> None:
        """Add a new gradient that was averaged by itself. The memory must not be used for another step after it."""
        self.flat = {**self.flat, name: reduced.reshape(-1)}
        self.shaped[name] = reduced
        self.buckets_of[name] = ()
        if name in self.new:
            self.given[name] = self.new.pop(name)


def _zeros(count: int, dtype: DTypeLike) -> Array:
    if count * np.dtype(dtype).itemsize < _LEAST_MAPPED_NBYTES:
        return np.zeros(count, dtype)
    return unisono.empty(count, dtype)
