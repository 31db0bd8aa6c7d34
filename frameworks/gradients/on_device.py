"""Gradients in the memory of a GPU: packed into buckets, reduced and unpacked there. The host waits for nothing.

Theory of operation
-------------------
The reducer has a `Workspace` on the device. Its stream waits for the stream on which the program uses a gradient. When
the last gradient of a bucket has been passed, one kernel packs all gradients of the bucket. Each bucket communicator
(`DeviceBucketComm`) has a stream of its own, which waits for the kernel. So backward goes on meanwhile, and so do other
buckets. When a step is handed out, one kernel unpacks all gradients, and the current streams of the program wait for
it.

With compression, a bucket travels as codes with fewer bits (`transports.cuda.kernels.quantised_form`), and the rounding
errors are added to the next gradients. Each rank owns a part of the bucket. A rank quantises the part of each owner,
the ranks exchange the parts, and each owner adds up what it received, in float32, and quantises the result for all. A
thread of the bucket communicator issues these steps in their order, because each one needs the one before, and so all
ranks issue them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from unisono import Communicator, UsageError
from unisono.collectives.arrays.device_detection import device_test_of, on_device
from unisono.collectives.device.adapters import DeviceArrays
from unisono.collectives.device.workspace import Vector, Workspace
from unisono.dtypes import DTYPES
from unisono.errors import TransportUnavailableError
from unisono.frameworks.arrays import FlatArray, flattening_of
from unisono.frameworks.gradients.compression import COMPRESSIONS, compression_of
from unisono.frameworks.gradients.layout import Gradient
from unisono.frameworks.pending import Pending
from unisono.transports.cuda.device import DeviceCopy
from unisono.transports.cuda.devices import device_of
from unisono.transports.cuda.kernels.quantised_form import QUANTISED_BLOCK, quantised_nbytes

_COMPRESSIBLE = ("float16", "bfloat16", "float32")


class _KnownClass(NamedTuple):
    """The class of a gradient on the host.

    Attributes:
        shown: the gradient in errors.
        cls: the class.
        flatten: `frameworks.arrays.flatten` for this class.
        is_on_device: returns whether an array of the class is on a GPU; None if none is used there.
    """

    shown: str
    cls: type
    flatten: Callable[[Any, str], FlatArray]
    is_on_device: Callable[[Any], bool] | None


class GradientMemory:
    """Where the gradients of a reducer are: on the host, or on one device, which the first gradient decides.

    A gradient mostly has one class in all steps. So its class is looked up in the first step, and later only compared.

    Attributes:
        workspace: the workspace on the device; None for the host.
    """

    def __init__(self) -> None:
        self.workspace: Workspace | None = None
        self._is_on_host = False
        self._known: dict[str, _KnownClass] = {}

    def flatten(self, array: Any, name: str) -> FlatArray:
        """Return the gradient `name` that the program passes, in the form that a step memory takes.

        Raises:
            UsageError: it cannot be used, or other gradients of this reducer are elsewhere.
        """
        known = self._known.get(name)
        if known is not None and type(array) is known.cls and not (known.is_on_device and known.is_on_device(array)):
            return known.flatten(array, known.shown)
        shown = f"the gradient {name!r}"
        lent = self.taken(array, shown)
        if lent is not None:
            return lent
        if self.workspace is not None:
            raise UsageError(f"{shown} is on the host, and others are on a GPU: use a reducer for each of the two")
        self._is_on_host = True
        cls: type = type(array)
        known = self._known[name] = _KnownClass(shown, cls, flattening_of(array, shown), device_test_of(cls))
        return known.flatten(array, shown)

    def taken(self, array: Any, name: str) -> FlatArray | None:
        """Return a gradient on a GPU; None for arrays on the host, and where the driver cannot be used."""
        return self._on_device(array, name) if on_device(array) else None

    def name(self) -> str:
        """Return the kind of memory, on which the ranks agree."""
        return "host" if self.workspace is None else "device"

    def open(self, ordinal: int) -> Workspace:
        """Use the device of this number.

        Raises:
            TransportUnavailableError: it cannot be used.
        """
        self.workspace = self.workspace or Workspace(device_of(ordinal))
        return self.workspace

    def close(self) -> None:
        """Free the memory on the device. The reducer has dropped all that lies there."""
        if self.workspace is not None:
            self.workspace.close()
        self.workspace = None

    def _on_device(self, array: Any, name: str) -> FlatArray | None:
        """Return a gradient on a device, behind whose stream the workspace is ordered; None without a driver."""
        memory = DeviceArrays()
        try:
            operand = memory.source(array, name, any_order=False)
        except TransportUnavailableError:  # torch copies its tensors to the host by its own means
            return None
        if self._is_on_host:
            raise UsageError(f"{name} is on a GPU, and other gradients are on the host: use a reducer for each place")
        if self.workspace is not None and self.workspace.device is not memory.device:
            raise UsageError(
                f"{name} is on cuda:{memory.device.ordinal}, and other gradients are on another GPU: use one GPU"
            )
        workspace = self.open(memory.device.ordinal)
        for stream in memory.streams():
            workspace.order(workspace.stream, stream)
        version = getattr(array, "_version", None)
        packed = memory.owners[-1] if operand.is_packed else None

        def unpacked() -> Any:
            array[...] = packed
            return array

        return FlatArray(
            array,
            operand.flat,
            operand.shape,
            operand.flat.flags.writeable,
            None if packed is None else unpacked,
            changed=lambda: getattr(array, "_version", None) != version,
            streams=memory.streams,
        )


class DeviceBuckets:
    """The gradients of one step that wait to be packed into buckets, and the results that wait to be unpacked."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._packs: dict[int, list[DeviceCopy]] = {}
        self._unpacks: list[DeviceCopy] = []
        self._delivered: list[FlatArray] = []

    def begin(self) -> None:
        """Forget the gradients of the last step."""
        self._packs, self._unpacks, self._delivered = {}, [], []

    def put(self, lent: FlatArray, slot: Vector, buckets: Iterable[tuple[int, Vector]]) -> None:
        """Note which part of a gradient goes to each of its buckets."""
        source = lent.flat.ctypes.data
        for index, bucket in buckets:
            begin = max(slot.pointer, bucket.pointer)
            end = min(slot.pointer + slot.nbytes, bucket.pointer + bucket.nbytes)
            if begin < end:
                self._packs.setdefault(index, []).append(DeviceCopy(begin, source + begin - slot.pointer, end - begin))

    def pack(self, index: int) -> None:
        """Issue the kernel that packs a bucket."""
        self._workspace.copy_extents(self._packs.pop(index, ()))

    def write_back(self, lent: FlatArray, reduced: Vector) -> Any:
        """Note a result for `deliver` to unpack; return the array that will hold it."""
        if not lent.writable:
            return reduced.copy()
        self._unpacks.append(DeviceCopy(lent.flat.ctypes.data, reduced.pointer, reduced.nbytes))
        self._delivered.append(lent)
        return lent.array

    def deliver(self) -> None:
        """Issue the kernel that unpacks the results, and let the streams of the program wait for it."""
        delivered, self._delivered = self._delivered, []
        self._workspace.copy_extents(self._unpacks)
        self._unpacks = []
        for stream in dict.fromkeys(stream for lent in delivered if lent.streams for stream in lent.streams()):
            self._workspace.order(stream, self._workspace.stream)
        for lent in delivered:
            lent.put_back()


def is_compressible_on_device(dtype: str) -> bool:
    """Return whether kernels can compress floats of a dtype."""
    return dtype in _COMPRESSIBLE


def check_compressible_on_device(gradients: Iterable[Gradient], compression: str) -> None:
    """Check that kernels can compress all gradients.

    Raises:
        UsageError: they cannot, or one has another dtype; the message names it.
    """
    if not compression_of(compression).on_device:
        raise UsageError(
            f"a GPU does not compress gradients to {compression}: pass compression=None or "
            f"{', '.join(name for name, each in COMPRESSIONS.items() if each.on_device)}"
        )
    for gradient in gradients:
        if not is_compressible_on_device(gradient.dtype):
            raise UsageError(
                f"the gradient of {gradient.name!r} is of {gradient.dtype}, which a GPU does not compress to "
                f"{compression}: convert it to one of {', '.join(_COMPRESSIBLE)}, or pass it to another reducer"
            )


class DeviceBucketComm:
    """A bucket communicator for buckets on a device: its stream, and a thread that issues compressed reductions."""

    def __init__(self, communicator: Communicator, workspace: Workspace) -> None:
        self.communicator, self.workspace = communicator, workspace
        self.stream = workspace.stream_for(communicator)
        self.thread = ThreadPoolExecutor(1, "unisono-gradients")

    def start(self, run: Callable[[], object]) -> DeviceReduction:
        """Let the thread issue a reduction, behind the work that the stream of the workspace has now."""
        self.workspace.order(self.stream, self.workspace.stream)
        return DeviceReduction(self, self.thread.submit(run))

    def close(self) -> None:
        """End the thread. The communicator has been closed, so its calls have ended."""
        self.thread.shutdown()


class DeviceReduction:
    """A reduction on a device, which is a `Pending`. It has ended when all of it has been issued to the device."""

    def __init__(self, comm: DeviceBucketComm, future: Future[object]) -> None:
        self._comm, self._future = comm, future

    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all has been issued, and let the stream of the workspace wait for its end on the device."""
        self._future.result(timeout_s)
        self._comm.workspace.order(self._comm.workspace.stream, self._comm.stream)

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._future.add_done_callback(lambda _: callback(self))


def reduction_on(
    comm: DeviceBucketComm, memory: Vector, residual: Vector | None, form: str | None, op: str, timeout_s: float | None
) -> Callable[[], Pending]:
    """Return a function that starts the reduction of a bucket in place; its residual is None without compression."""
    memory = memory.on(comm.stream)
    if residual is None or form is None:
        run = comm.communicator.plan("allreduce", memory, op=op, out=memory, timeout_s=timeout_s)
    else:
        reduction = _ByCodes if DTYPES[form].itemsize == 1 else _InNarrowFloats
        run = reduction(comm, memory, residual.on(comm.stream), form, op, timeout_s).run
    return lambda: comm.start(run)


class _InNarrowFloats:
    """The reduction of a bucket in float16 or bfloat16: one allreduce, which adds up in float32 and rounds once."""

    def __init__(
        self, comm: DeviceBucketComm, memory: Vector, residual: Vector, form: str, op: str, timeout_s: float | None
    ) -> None:
        self._comm, self._memory, self._residual = comm, memory, residual
        self._form, self._dtype = DTYPES[form], DTYPES[memory.dtype.name]
        wire = comm.workspace.zeros(memory.size, form)
        comm.workspace.order(comm.stream, comm.workspace.stream)
        self._wire = wire.on(comm.stream)
        self._allreduce = comm.communicator.plan("allreduce", self._wire, op=op, out=self._wire, timeout_s=timeout_s)

    def run(self) -> None:
        device, memory, wire, stream = self._comm.workspace.device, self._memory, self._wire, self._comm.stream
        device.quantise(
            wire.pointer, memory.pointer, self._residual.pointer, memory.size, self._dtype, self._form, stream
        )
        self._allreduce()
        device.dequantise(memory.pointer, wire.pointer, 1, memory.size, self._dtype, self._form, 1, stream)


class _BucketPart(NamedTuple):
    """The part of a bucket that a rank owns: the index of its first element, and the number of its elements."""

    first: int
    elements: int


class _ByCodes:
    """The reduction of a bucket in codes of 8 bits: an alltoall of codes to their owners, and an allgather of sums."""

    def __init__(
        self, comm: DeviceBucketComm, memory: Vector, residual: Vector, form: str, op: str, timeout_s: float | None
    ) -> None:
        world, workspace = comm.communicator, comm.workspace
        self._comm, self._memory, self._residual, self._rank = comm, memory, residual, world.rank
        self._form, self._dtype = DTYPES[form], DTYPES[memory.dtype.name]
        self._weight = world.size if op == "avg" else 1
        part = -(-memory.size // (world.size * QUANTISED_BLOCK)) * QUANTISED_BLOCK
        starts = [min(memory.size, owner * part) for owner in range(world.size + 1)]
        self._parts = [_BucketPart(begin, end - begin) for begin, end in pairwise(starts)]
        self._row_nbytes = quantised_nbytes(self._form, part)
        nbytes = world.size * self._row_nbytes
        # Zeros, because the rows of shorter parts have bytes that no kernel writes.
        wire, received = (workspace.zeros(nbytes, np.uint8) for _ in range(2))
        own, total = workspace.zeros(self._row_nbytes, np.uint8), workspace.zeros(part, np.float32)
        workspace.order(comm.stream, workspace.stream)
        self._wire, self._received, self._own, self._total = (
            vector.on(comm.stream) for vector in (wire, received, own, total)
        )
        self._alltoall = world.plan("alltoall", self._wire, out=self._received, timeout_s=timeout_s)
        self._allgather = world.plan("allgather", self._own, out=self._wire, timeout_s=timeout_s)

    def run(self) -> None:
        self._quantise_for_owners()
        self._alltoall()
        self._sum_own_part()
        self._allgather()
        self._dequantise_from_owners()

    def _quantise_for_owners(self) -> None:
        for owner, part in enumerate(self._parts):
            self._comm.workspace.device.quantise(
                self._wire.pointer + owner * self._row_nbytes,
                self._element(self._memory, part),
                self._element(self._residual, part),
                part.elements,
                self._dtype,
                self._form,
                self._comm.stream,
            )

    def _sum_own_part(self) -> None:
        device, stream, part = self._comm.workspace.device, self._comm.stream, self._parts[self._rank]
        device.dequantise(
            self._total.pointer,
            self._received.pointer,
            len(self._parts),
            part.elements,
            DTYPES["float32"],
            self._form,
            self._weight,
            stream,
            stride=self._row_nbytes,
        )
        # Only the owner knows what this rounding loses, so it adds all of it to its own next gradient.
        device.quantise(
            self._own.pointer,
            self._total.pointer,
            self._element(self._residual, part),
            part.elements,
            DTYPES["float32"],
            self._form,
            stream,
            feeds=False,
            weight=float(self._weight),
        )

    def _dequantise_from_owners(self) -> None:
        for owner, part in enumerate(self._parts):
            self._comm.workspace.device.dequantise(
                self._element(self._memory, part),
                self._wire.pointer + owner * self._row_nbytes,
                1,
                part.elements,
                self._dtype,
                self._form,
                1,
                self._comm.stream,
            )

    @staticmethod
    def _element(vector: Vector, part: _BucketPart) -> int:
        itemsize: int = vector.dtype.itemsize
        return vector.pointer + part.first * itemsize
