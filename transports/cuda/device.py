"""`Device`: the small interface of a GPU that collectives need, with the rules for all implementations.

No method waits for the device. A call *issues* work to a stream and returns, and the device does it later: in order
within a stream, and in no order between streams. Events order streams and processes:

- A wait binds to the last record that had been *issued* when the wait was issued, in whichever process. If there was
  none, it binds to nothing. So before a process waits for another one, it must know that the record has been issued.
  The other process publishes a number on the host after each record.
- Suppose an event is recorded again before all waits for its last record have been issued. Then these waits bind to the
  new record, so they wait for too much and may close a cycle. So an event is reused only after they have been issued.
- Memory may not be freed or closed while work on it is under way.
- A handle opens in every process but the exporter, once per process at a time. The exporter has the address already.
- An exporter frees memory only after all processes that opened it have closed it.

Devices with a *pool* also have memory that is taken in the order of a stream. The pool keeps memory that was given, so
that a later `take` gets it at once.

CUDA does not promise that releasing memory waits for the work that uses it. So memory is released only when that work
is over: at once if the host has seen its end (`free`), or else behind events (`give`).

Devices with *flags* order processes without events. A flag is a number in memory of its owner that other processes map.
A stream raises a flag after its work, and a stream of the owner waits until the flag has reached a number:

- A wait may be issued before the flag is raised, so the host of neither process has to look at anything.
- If the process that should raise a flag has died, the owner releases its own flags, and its streams go on.
- One stream at a time raises a flag, to a higher number each time. Numbers have 64 bits and are compared cyclically:
  `a` is above `b` if ``0 < (a - b) % 2**64 < 2**63``.

Devices with *graphs* keep work on one stream as a graph, and issue all of it again by one call. Its flags have the same
numbers each time.

`CudaDevice` (`driver_api/cuda_device.py`) is the real device. The tests use a hostile one on host memory: it does all
work as late and in as bad an order as the rules allow, and reports every violation of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, NewType, Protocol

from unisono.dtypes import DType
from unisono.errors import UnisonoError
from unisono.operations import Op
from unisono.transports.contracts.call import AnyArray
from unisono.transports.cuda.issued_calls import IssuedCall

# A stream, by its handle. As in `__cuda_array_interface__`, 1 is the legacy default stream and 2 that of the thread.
Stream = NewType("Stream", int)
LEGACY_STREAM = Stream(1)
THREAD_STREAM = Stream(2)

# Memory for export is allocated in multiples of this, so that a handle exposes nothing else.
ALLOCATION_NBYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory of a device, allocated by this process or opened from another one.

    Attributes:
        pointer: the address of the first byte in this process.
        nbytes: the size.
    """

    pointer: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Event:
    """A point in the work of a stream. Other streams can wait for it, also those of other processes."""

    handle: int


# A number beyond all that flags are raised to. The owner of a flag releases the streams that wait by it.
RELEASED = 1 << 62


@dataclass(frozen=True, slots=True)
class Flags:
    """Flags of this process or of another one, all 0 at first.

    Attributes:
        address: the address of the first one in this process, as the host sees it.
        count: their number.
    """

    address: int
    count: int


@dataclass(frozen=True, slots=True)
class DeviceGraph:
    """Work that a device issues again as a whole."""

    handle: int


@dataclass(frozen=True, slots=True)
class PointerFacts:
    """The driver's information about an address.

    Attributes:
        kind: ``"device"``, ``"pooled"`` (stream-ordered, or mapped in parts, so that it has no handle), ``"managed"``,
            ``"pinned"`` or ``"host"``.
        ordinal: the number of the device in this process; -1 for host memory.
        allocation: the allocation that the address is in, as far as the driver knows it.
    """

    kind: str
    ordinal: int
    allocation: Allocation


class DeviceCopy(NamedTuple):
    """A copy of `nbytes` from one address of the device to another one."""

    dst: int
    src: int
    nbytes: int


def is_over(device: Device, event: Event) -> bool:
    """Return whether the last record of an event has happened, or never will, because the device failed."""
    try:
        return device.done(event)
    except UnisonoError:
        return True


class Device(Protocol):
    """One GPU, as one process uses it. Several threads may call it.

    Attributes:
        name: the product name.
        uuid: the identity of the GPU, equal in all processes that use it.
        ordinal: its number in this process.

    Every method raises `TransportUnavailableError` if the device cannot do it, with the reason, and `InternalError` if
    the driver fails. After `abort`, all methods raise `AbortedError`, except `done` and those that return resources:
    `free`, `give`, `close`, `unpin`, `end_stream`, `end_event`, `end_flags`, `end_graph` and `release_flags`.

    A device may fail for good, for example because a kernel of the program has ended its context. Then all methods
    raise `TransportUnavailableError`, except those that return resources, which do nothing. No work is under way then.

    `free`, `give`, `close`, `unpin` and `end_flags` return at once. The device releases the memory later, in its own
    thread, because a driver may wait for all work of the process meanwhile. `has_released` says when.
    """

    name: str
    uuid: str
    ordinal: int

    def allocate(self, nbytes: int) -> Allocation:
        """Return new memory of at least `nbytes`. It shares no allocation; its content is undefined."""
        ...

    def free(self, allocation: Allocation) -> None:
        """Free memory from `allocate` or `take`. The host has seen the end of all work on it."""
        ...

    def give(self, allocation: Allocation, events: Collection[Event] | None) -> None:
        """Free memory from `allocate` or `take` when `events` have happened, and end these; the host goes on.

        None stands for all work that this process has issued to the device so far, on any stream, by any library.
        While a stream records a graph, the driver cannot name that work, so the memory is kept until the graph is
        complete.
        """
        ...

    def has_pool(self) -> bool:
        """Return whether the device has a pool, so that `take` can be used."""
        ...

    def take(self, nbytes: int, stream: Stream) -> Allocation:
        """Return memory of the pool for work that is issued to `stream` from now on, or ordered behind it.

        It cannot be exported, and its content is undefined.
        """
        ...

    def export(self, allocation: Allocation) -> bytes:
        """Return the handle with which other processes open memory from `allocate`."""
        ...

    def open(self, handle: bytes) -> Allocation:
        """Return the memory that another process exported as `handle`, mapped here.

        Raises:
            TransportUnavailableError: this process exported it, or its device cannot be reached from this one.
        """
        ...

    def close(self, allocation: Allocation) -> None:
        """Unmap memory from `open`."""
        ...

    def can_reach(self, uuid: str) -> bool:
        """Return whether memory of the device `uuid`, which may be this one, can be opened and used here."""
        ...

    def new_stream(self, most_blocks: int = 0) -> Stream:
        """Return a new stream, which does not synchronise with the default stream.

        Its kernels use at most `most_blocks` blocks of threads, so that others run beside them; 0 for no limit.
        """
        ...

    def lasting_stream(self) -> Stream:
        """Return a stream that exists as long as the process, the same one each time, for arrays of the program."""
        ...

    def end_stream(self, stream: Stream) -> None:
        """Destroy a stream from `new_stream`, after its work has ended."""
        ...

    def is_capturing(self, stream: Stream) -> bool:
        """Return whether `stream` records a graph. During that no work runs, and the host may wait for nothing."""
        ...

    def new_event(self, *, shared: bool = False) -> Event:
        """Return a new event without a record. A `shared` event can be exported.

        Drivers have a limited number of shared events, and create them slowly.
        """
        ...

    def export_event(self, event: Event) -> bytes:
        """Return the handle with which other processes open an event from `new_event`."""
        ...

    def open_event(self, handle: bytes) -> Event:
        """Return the event that another process exported as `handle`."""
        ...

    def end_event(self, event: Event) -> None:
        """Destroy an event from `new_event` or `open_event`."""
        ...

    def record(self, event: Event, stream: Stream) -> None:
        """Record `event`: it happens when all work issued to `stream` so far is done."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Make work that is issued to `stream` from now on wait for the last record of `event`; the host goes on."""
        ...

    def done(self, event: Event) -> bool:
        """Return whether the last record of `event` has happened; true if there is none."""
        ...

    def has_flags(self) -> bool:
        """Return whether streams of the device can raise flags and wait for them."""
        ...

    def new_flags(self, count: int) -> Flags:
        """Return new flags of this process."""
        ...

    def export_flags(self, flags: Flags) -> bytes:
        """Return the handle with which processes, this one too, open flags from `new_flags`."""
        ...

    def open_flags(self, handle: bytes) -> Flags:
        """Return the flags that a process of this host exported as `handle`, mapped here.

        Raises:
            TransportUnavailableError: they cannot be mapped: the process has ended, or is in another container.
        """
        ...

    def end_flags(self, flags: Flags) -> None:
        """Unmap flags from `new_flags` or `open_flags`, when no work of this process uses them any more."""
        ...

    def raise_flag(self, flags: Flags, index: int, number: int, stream: Stream) -> None:
        """Set a flag to `number` when all work issued to `stream` so far is done; the host goes on.

        Streams that wait for it see all that this work has written. `number` must be above that of the last raise.
        """
        ...

    def await_flag(self, flags: Flags, index: int, number: int, stream: Stream) -> None:
        """Make work that is issued to `stream` from now on wait until an own flag is at least `number`."""
        ...

    def release_flags(self, flags: Flags, number: int = RELEASED) -> None:
        """Set all own flags to `number` now, by the host. A stream of another process may still set them back."""
        ...

    def has_graphs(self) -> bool:
        """Return whether work with flags can be captured into graphs."""
        ...

    def capture(self, calls: Sequence[IssuedCall], stream: Stream) -> DeviceGraph:
        """Return a graph of calls of this device; nothing is issued.

        All calls are work on `stream` with constant arguments: no records of events, and no waits for them. `stream`
        is from `new_stream`, and nothing else is issued to it meanwhile.
        """
        ...

    def launch(self, graph: DeviceGraph, stream: Stream) -> None:
        """Issue the work of a graph to `stream`, behind the work that was issued before."""
        ...

    def end_graph(self, graph: DeviceGraph) -> None:
        """Release a graph. Work of it that is under way goes on."""
        ...

    def copy(self, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        """Copy `nbytes` between addresses of the device, or of memory from `pin`. They may not overlap."""
        ...

    def reduce(
        self, dst: int, sources: Sequence[int], count: int, dtype: DType, op: Op, divisor: int, stream: Stream
    ) -> None:
        """Combine all ``sources[…][i]`` in order into ``dst[i]``, rounded once, for `count` elements.

        The result equals that of `transports.reductions.reduce_into` in every bit. `dst` may be one of the sources, and
        may not overlap them otherwise. A lowered average is divided by `divisor`; other operations ignore it.
        """
        ...

    def load_reduction(self, k: int, dtype: DType, op: Op) -> None:
        """Load the kernels by which `reduce` combines `k` arrays, and for an operation with a factor that of `lift`.

        A driver may wait until the device has done its work before it loads a kernel. So kernels are loaded before
        streams wait for other ranks.
        """
        ...

    def lift(self, dst: int, src: int, count: int, dtype: DType, op: Op, stream: Stream) -> None:
        """Multiply ``src[i]`` by the factor of `op` into ``dst[i]``, for `count` elements; `dst` may be `src`.

        The same as `transports.reductions.lift`, which says what the factor may be.
        """
        ...

    def copy_extents(self, extents: Sequence[DeviceCopy], stream: Stream) -> None:
        """Make copies by one kernel, in any order. None may write what another one of them reads or writes."""
        ...

    def quantise(
        self,
        codes: int,
        src: int,
        residual: int,
        count: int,
        dtype: DType,
        form: DType,
        stream: Stream,
        *,
        feeds: bool = True,
        weight: float = 1.0,
    ) -> None:
        """Convert `count` elements to codes and scales, which lie at `codes` as `quantised_form` says.

        Args:
            codes: the address of the codes, a multiple of 16.
            src: the elements, of `dtype`: float16, bfloat16 or float32.
            residual: the address of the rounding error of each element, as float32; 0 keeps no residual.
            count: the number of elements.
            dtype: the dtype of the elements.
            form: the dtype of the codes, which has fewer bits than `dtype`.
            stream: the stream to issue to.
            feeds: whether the residual is added to the elements first, and then becomes the rounding error of their
                codes. If not, `weight` times the rounding error of the codes is added to the residual.
            weight: see `feeds`.
        """
        ...

    def dequantise(
        self,
        dst: int,
        codes: int,
        rows: int,
        count: int,
        dtype: DType,
        form: DType,
        divisor: int,
        stream: Stream,
        *,
        stride: int = 0,
    ) -> None:
        """Add up `rows` quantised arrays in order, divide by `divisor`, and store `count` elements of `dtype`.

        Each array begins `stride` bytes behind the one before, by default `quantised_nbytes(form, count)`. All is
        computed in float32.
        """
        ...

    def compile(self, calls: Sequence[IssuedCall]) -> Callable[[], None]:
        """Return a function that makes calls of this device again, as `issued_calls.issue` does, and raises its errors.

        One thread at a time may call it.
        """
        ...

    def pin(self, nbytes: int) -> AnyArray:
        """Return `nbytes` of pinned host memory, as uint8. The device copies it while the host goes on."""
        ...

    def unpin(self, array: AnyArray) -> None:
        """Free memory from `pin`."""
        ...

    def current(self) -> AbstractContextManager[object]:
        """Return a with-block in which this device is the current one of the thread, for calls of other libraries."""
        ...

    def has_released(self) -> bool:
        """Return whether the device has released all memory that was given back so far."""
        ...

    def facts(self, pointer: int) -> PointerFacts:
        """Return the driver's information about an address. Ordinary host memory is no error."""
        ...

    def abort(self) -> None:
        """Make all later calls that issue work fail. Never waits; any thread may call it."""
        ...
