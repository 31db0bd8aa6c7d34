"""The memory of training steps, with the reductions of its buckets, and the memory of residuals.

A step memory holds all gradients of one training step. It is used for one step after the other. With a lag several
steps are in flight, so a reducer has several step memories, all of one layout: `StepMemoryPool` hands them out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

import unisono
from unisono.collectives.device.workspace import Vector, Workspace
from unisono.frameworks.arrays import Array, FlatArray, same_bits
from unisono.frameworks.gradients.agreement import Complaint, Flags
from unisono.frameworks.gradients.bucket_comms import BucketComms
from unisono.frameworks.gradients.layout import Gradient, Layout, layout_of
from unisono.frameworks.gradients.on_device import DeviceBuckets
from unisono.frameworks.gradients.timeline import BucketSpan, Step, now
from unisono.frameworks.pending import Pending
from unisono.transports.cuda.device import DeviceCopy

# Below this size, mapping shared memory costs more time than it saves.
_LEAST_MAPPED_NBYTES = 100 << 10
# The first of the flags' integers holds `Flags` in its lowest byte, and a bit for each turn above it.
_FIRST_TURN_BIT = 8
_SENT_FLAGS = (1 << _FIRST_TURN_BIT) - 1
_NO_FLAG = Flags(0)
# The three integers of a step without flags and without a checksum.
_NO_FLAGS = (0, 0, ~0)


class Slots:
    """Flat arrays of zeros with a place for each gradient of a layout.

    Args:
        layout: where each gradient lies.
        allocate: ``allocate(count, dtype)`` returns an array of zeros.
        dtype: the dtype of all arrays; by default each gradient keeps its own.

    Attributes:
        flat: by name, the memory of each gradient as a one-dimensional array.
        shaped: by name, the same memory in the shape of the gradient.
        buckets: the memory of each bucket.
        arrays: by dtype, the memory of all its gradients.
    """

    def __init__(
        self, layout: Layout, allocate: Callable[[int, DTypeLike], Any], dtype: DTypeLike | None = None
    ) -> None:
        arrays = {name: allocate(count, np.dtype(dtype or name)) for name, count in layout.lengths.items()}
        self.arrays = arrays
        self.flat: Mapping[str, Any] = {
            name: arrays[gradient.dtype][layout.offsets[name] :][: gradient.elements]
            for name, gradient in layout.gradients.items()
        }
        self.shaped = {name: flat.reshape(layout.gradients[name].shape) for name, flat in self.flat.items()}
        self.buckets = [arrays[bucket.dtype][bucket.start : bucket.stop] for bucket in layout.buckets]

    def write(self, saved: Mapping[str, Array]) -> None:
        """Copy the arrays in `saved` to the memory of the gradients of the same names. Other names are ignored."""
        for name, array in saved.items():
            if name in self.flat:
                _load(self.flat[name], array)

    def copies(self) -> dict[str, Array]:
        """Return copies of all gradients on the host, by name."""
        return {name: _fetched(array) for name, array in self.shaped.items()}


class StepMemory(Slots):
    """The memory of one training step, and the state of that step on this rank.

    Args:
        layout: where each gradient lies.
        start_order: the indices of the buckets, in the order in which all ranks start them.
        reduction: ``reduction(index, memory)`` returns a function that starts the reduction of a bucket.
        workspace: where gradients on a device are reduced; None for gradients on the host.

    Attributes:
        layout, start_order: the arguments of the same names.
        buckets_of: by name, the indices of the buckets in which a gradient lies.
        starts: by bucket, the function that starts its reduction.
        flags: three integers that this rank sends to the others: its `Flags`, the checksum of its parameters, and the
            complement of the checksum. When `flags_work` has ended, they are joined by "bor" with those of all ranks.
        works: by bucket, its reduction, in the order in which the reductions were started.
        ended: the buckets whose reductions have been waited for, without an error.
        start_flags: starts the reduction of `flags`; None before the first step, as the pool does not know its ranks.
        flags_work: the reduction of `flags`; None before it is started.
        received: by name, the gradients that the program has passed in this step.
        new: by name, the gradients that the program has passed and that are not in the layout.
        turn: the number of `set_turn`.
        lacking: by bucket, how many of its gradients have not been passed.
        full: the buckets that lack no gradient, in the order in which they became full.
        absent: the names of gradients that no rank has passed in this step; it is known when the flags are acted on.
        complaint: the first error of this rank in this step.
        step: the times of the training step.
        notes_ends: whether the reducer notes the end of each reduction as soon as it happens. If not, it notes the end
            when it waits for the reduction.
    """

    def __init__(
        self,
        layout: Layout,
        start_order: Sequence[int],
        reduction: Callable[[int, Any], Callable[[], Pending]],
        workspace: Workspace | None = None,
    ) -> None:
        super().__init__(layout, _zeros if workspace is None else workspace.zeros)
        self._workspace = workspace
        self._on_device = None if workspace is None else DeviceBuckets(workspace)
        self.layout, self.start_order = layout, start_order
        self.buckets_of = layout.buckets_of()
        self._counts = [len(bucket.names) for bucket in layout.buckets]
        self.starts = [self._start_of(index, reduction(index, memory)) for index, memory in enumerate(self.buckets)]
        self.flags = np.zeros(3, np.int64)
        self.start_flags: Callable[[], Pending] | None = None
        self.begin(Step(-1))

    def begin(self, step: Step, *, notes_ends: bool = False) -> None:
        """Reset the state for a new training step."""
        self.flags[:] = _NO_FLAGS
        self.turn = 0
        self.works: dict[int, Pending] = {}
        self.ended: set[int] = set()
        self.flags_work: Pending | None = None
        self.received: dict[str, FlatArray] = {}
        self.new: dict[str, FlatArray] = {}
        if self._on_device is not None:
            self._on_device.begin()
        self.lacking = list(self._counts)
        self.full: list[int] = []
        self.absent: frozenset[str] = frozenset()
        self.complaint: Complaint | None = None
        self.step = step
        self.notes_ends = notes_ends

    def complain(self, complaint: Complaint) -> None:
        """Keep the first complaint of this training step, and set the flag by which the other ranks learn of it."""
        self.complaint = self.complaint or complaint
        self.flags[0] |= Flags.COMPLAINT

    def fill(self, name: str, moment: float) -> bool:
        """Count a gradient, passed at `moment`, in its buckets. Return whether one of them is full now."""
        is_one_full = False
        for index in self.buckets_of[name]:
            self.lacking[index] -= 1
            self.step.spans[index].ready_s = moment
            if not self.lacking[index]:
                self.full.append(index)
                is_one_full = True
        return is_one_full

    def _start_of(self, index: int, start: Callable[[], Pending]) -> Callable[[], Pending]:
        """Return the function that starts the reduction of a bucket; on a device, it packs the gradients first."""
        buckets = self._on_device
        if buckets is None:
            return start

        def pack_and_start() -> Pending:
            buckets.pack(index)
            return start()

        return pack_and_start

    def wait(self, index: int) -> None:
        """Wait for the reduction of a bucket that has been started, and raise its error if it failed."""
        self.works[index].wait()
        self.ended.add(index)
        span = self.step.spans[index]
        span.end_s = span.end_s or now()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all gradients: first those of the layout in its order, then those that `add` has added."""
        return tuple(self.flat)

    def put(self, name: str, lent: FlatArray) -> None:
        """Copy a gradient of the right shape and dtype to its slot, on a device when its bucket is started."""
        self.received[name] = lent
        if lent.streams is None:
            slot = self.flat[name]
            slot[...] = lent.flat  # numpy copies nothing if the gradient lies in its slot
        elif self._on_device is not None:
            self._on_device.put(
                lent, self.flat[name], [(index, self.buckets[index]) for index in self.buckets_of[name]]
            )

    def put_zeros(self, name: str) -> None:
        """Let a gradient that was not passed count as zeros."""
        if self._workspace is None:
            self.flat[name][...] = 0
        else:
            self._workspace.clear(self.flat[name])

    def write_back(self, name: str, reduced: Any) -> Any:
        """Copy the reduced gradient into the array that the program has passed, and return that array.

        Return a copy of `reduced` if the program has passed no array for this gradient. On a device, `deliver` copies.
        """
        lent = self.received.get(name)
        if lent is None:
            return reduced.copy()
        if lent.streams is None:
            return lent.with_elements(reduced)
        assert self._on_device is not None, "gradients on a device have a workspace"
        return self._on_device.write_back(lent, reduced)

    def write_zeros(self) -> None:
        """Write zeros into the arrays that the program has passed."""
        for lent in self.received.values():
            if lent.streams is None:
                lent.with_elements(np.zeros_like(lent.flat))
            elif self._workspace is not None and self._on_device is not None:
                self._on_device.write_back(lent, self._workspace.zeros(lent.flat.size, lent.flat.dtype))

    def deliver(self) -> None:
        """Make the copies to arrays on a device that `write_back` has left."""
        if self._on_device is not None:
            self._on_device.deliver()

    def new_array(self, gradient: Gradient) -> Any:
        """Return a copy of a new gradient, in its shape; zeros if the program has not passed it."""
        lent = self.new.get(gradient.name)
        if self._workspace is None:
            return (
                np.zeros(gradient.shape, gradient.dtype) if lent is None else lent.flat.reshape(gradient.shape).copy()
            )
        made = self._workspace.zeros(gradient.elements, gradient.dtype)
        if lent is not None:
            self._workspace.copy_extents([DeviceCopy(made.pointer, lent.flat.ctypes.data, made.nbytes)])
        return made.reshape(gradient.shape)

    def add_all(self, other: StepMemory) -> None:
        """Add the gradients of `other`, a step of the same layout, to those of this step."""
        self.absent &= other.absent
        if self._workspace is None:
            _add(self.flat, other.flat)
            return
        for name, total in self.arrays.items():
            self._workspace.add(total, other.arrays[name])

    def started(self) -> list[Pending]:
        """Return the started reductions of this training step: those of buckets, and that of the flags."""
        return [*self.works.values(), *([self.flags_work] if self.flags_work is not None else [])]

    def set_checksum(self, value: int) -> None:
        """Set the checksum of the parameters, which the ranks compare when the flags are reduced."""
        self.flags[1:] = value, ~value

    def set_turn(self, turn: int) -> None:
        """Set a number from 0 to 7 that must be the same on all ranks. Each number is a bit of the flags."""
        self.turn = turn
        self.flags[0] |= 1 << (_FIRST_TURN_BIT + turn)

    def joined_flags(self) -> Flags:
        """Return the flags of all ranks. Call it when `flags_work` has ended."""
        # If two ranks differ in a bit of the checksum, "bor" sets that bit in the checksum and in its complement.
        differ = Flags.PARAMETERS_DIFFER if self.flags[1] & self.flags[2] else _NO_FLAG
        sent, turns = int(self.flags[0]) & _SENT_FLAGS, int(self.flags[0]) >> _FIRST_TURN_BIT
        if not (differ or sent or turns & (turns - 1)):  # in almost every step
            return differ
        return Flags(sent) | differ | (Flags.OTHER_TURN if turns & (turns - 1) else _NO_FLAG)

    def leave_out(self, absent: frozenset[str]) -> None:
        """Note the gradients that no rank has passed, so that results do not have them."""
        self.absent = absent
        self.flags[0] &= ~Flags.MISSING

    def present(self, reduced: Mapping[str, Any]) -> dict[str, Any]:
        """Return `reduced` without the gradients that no rank has passed."""
        return {name: gradient for name, gradient in reduced.items() if name not in self.absent}

    def note_new(self, name: str, lent: FlatArray) -> None:
        """Keep a gradient that is not in the layout until all ranks have agreed on it, and set its flag."""
        self.new[name] = lent
        self.flags[0] |= Flags.NEW_GRADIENT

    def add(self, name: str, reduced: Any) -> None:
        """Add the average of a new gradient to the results. This memory must not be used for a later training step."""
        self.flat = {**self.flat, name: reduced.reshape(-1)}
        self.shaped[name] = reduced
        self.buckets_of[name] = ()
        if name in self.new:
            self.received[name] = self.new.pop(name)


class StepMemoryPool:
    """All memory of one layout: the step memories, which are used again and again, and the residuals.

    Args:
        comms: the bucket communicators.
        gradients: the gradients, in the order in which they become ready.
        bucket_nbytes: the approximate size of a bucket.
        start_order: the indices of the buckets, in the order in which they are started; by default, as they become
            ready.
        previous: the pool of the previous layout, whose residuals are copied.
        workspace: where gradients on a device are reduced; None for gradients on the host.

    Attributes:
        layout: where gradients lie.
        start_order: the order in which buckets are started.
        states: by their kind, the values that compression keeps of each gradient; empty if nothing is compressed.
    """

    def __init__(
        self,
        comms: BucketComms,
        gradients: Iterable[Gradient],
        bucket_nbytes: int,
        start_order: Sequence[int] = (),
        previous: StepMemoryPool | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        comms.open(workspace)
        self._workspace = workspace
        self.layout = layout_of(gradients, bucket_nbytes)
        self.start_order = tuple(start_order) or tuple(range(len(self.layout.buckets)))
        self.states: dict[str, Slots] = {}
        if any(comms.compresses(dtype) for dtype in self.layout.lengths):
            for kind in comms.kinds_of_state:
                slots = self.states[kind] = Slots(
                    self.layout, np.zeros if workspace is None else workspace.zeros, np.float32
                )
                slots.write(previous.copy_state(kind) if previous else {})
        self._comms = comms
        self._algorithms = [comms.algorithm(bucket.nbytes, bucket.dtype) for bucket in self.layout.buckets]
        self._free: deque[StepMemory] = deque()
        self._count = 0  # of step memories of this layout

    def with_layout(
        self, gradients: Iterable[Gradient], bucket_nbytes: int, start_order: Sequence[int] = ()
    ) -> StepMemoryPool:
        """Return a pool of another layout, with the residuals of this one."""
        return StepMemoryPool(self._comms, gradients, bucket_nbytes, start_order, self, self._workspace)

    def take(self) -> StepMemory:
        """Return a step memory that is free, or a new one."""
        if self._free:
            return self._free.popleft()
        self._count += 1
        return StepMemory(self.layout, self.start_order, self._reduction, self._workspace)

    def put_back(self, memory: StepMemory) -> None:
        """Keep a step memory for a later training step. A step memory of another layout is dropped."""
        if memory.layout is self.layout:
            self._free.append(memory)

    def spans(self) -> list[BucketSpan]:
        """Return a record for each bucket of a training step, in which all times are 0."""
        return list(map(BucketSpan, self.layout.buckets, self._algorithms))

    def copy_state(self, kind: str) -> dict[str, Array]:
        """Return copies of a kind of state, by name; it is empty if there is no state of this kind."""
        return self.states[kind].copies() if kind in self.states else {}

    def _reduction(self, index: int, memory: Any) -> Callable[[], Pending]:
        is_compressed = self._comms.compresses(self.layout.buckets[index].dtype)
        state = {kind: slots.buckets[index] for kind, slots in self.states.items()} if is_compressed else None
        pieces = self.layout.pieces_of(self.layout.buckets[index])
        return self._comms.reduction(self._count, self.start_order.index(index), memory, state, pieces)


def _load(slot: Any, elements: Array) -> None:
    if isinstance(slot, Vector):
        slot.load(elements)
    else:
        slot[...] = elements.reshape(-1)


def _fetched(slot: Any) -> Array:
    elements: Array = slot.fetch() if isinstance(slot, Vector) else slot.copy()
    return elements


@same_bits
def _add(totals: Mapping[str, Array], others: Mapping[str, Array]) -> None:
    for name, total in totals.items():
        np.add(total, others[name], out=total)


def _zeros(count: int, dtype: DTypeLike) -> Array:
    if count * np.dtype(dtype).itemsize < _LEAST_MAPPED_NBYTES:
        return np.zeros(count, dtype)
    return unisono.empty(count, dtype)
