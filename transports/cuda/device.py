"""What a GPU does for collectives: a small interface, and the rules that its implementations share.

Nothing here waits for the device: calls *issue* work to a stream and return, and the device does it later, in the order
of each stream and in no order between streams. What holds between streams and processes is said by events:

- A wait binds to the record that was *issued* last when the wait was issued, in whatever process, or to nothing if
  there was none. So whoever waits for another process must know that its record has been issued: the other says so on
  the host, by a number that it publishes after each record.
- An event that is recorded again before all have issued their waits for the record before makes these wait for more
  than they meant, and may close a cycle. So an event is not used again before they have.
- Memory may not be freed or closed while work on it is under way.
- A handle opens in every process but the exporter, once per process at a time; the exporter has the address already.
- Closing comes before freeing: an exporter frees only when all that opened its memory have closed it.

`CudaDevice` (`driver.py`) is the real one. The tests have one on host memory that is hostile: it does everything as
late and in as bad an order as the rules allow, and traps what breaks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from unisono.dtypes import DType
from unisono.operations import Op
from unisono.transports.contracts.call import AnyArray

# A stream by its handle; as in `__cuda_array_interface__`, 1 is the legacy default stream and 2 the thread's own.
Stream = NewType("Stream", int)
LEGACY_STREAM = Stream(1)
THREAD_STREAM = Stream(2)

# Memory to export is allocated by itself, in multiples of this, so that a handle shows nothing else.
ALLOCATION_NBYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory of the device: its own, or that of another process which has been opened here.

    Attributes:
        pointer: the address of its first byte in this process.
        nbytes: its size.
    """

    pointer: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Event:
    """A point in the work of a stream that other streams wait for, also those of other processes."""

    handle: int


@dataclass(frozen=True, slots=True)
class PointerFacts:
    """What the driver knows of an address.

    Attributes:
        kind: ``"device"``, ``"pooled"`` (stream-ordered or mapped by parts, which has no handle), ``"managed"``,
            ``"pinned"`` or ``"host"``.
        ordinal: the number of its device in this process; -1 for memory of the host.
        allocation: the whole that it is a part of, as far as that is known.
    """

    kind: str
    ordinal: int
    allocation: Allocation


class Device(Protocol):
    """One GPU as one process uses it. Several threads may use it.

    Attributes:
        name: what it is called by its maker.
        uuid: what it is, equal in all processes that use the same one.
        ordinal: its number in this process.

    Every method raises `TransportUnavailableError` where the device cannot do it, saying why, and `InternalError` if
    the driver fails; after `abort`, all but `done` and what gives things back (`free`, `close`, `unpin`, `end_stream`
    and `end_event`) raise `AbortedError`.
    """

    name: str
    uuid: str
    ordinal: int

    def allocate(self, nbytes: int) -> Allocation:
        """Return new memory of at least `nbytes`, which no other allocation shares; its content is undefined."""
        ...

    def free(self, allocation: Allocation) -> None:
        """Give memory of `allocate` back."""
        ...

    def export(self, allocation: Allocation) -> bytes:
        """Return the handle by which other processes open memory of `allocate`."""
        ...

    def open(self, handle: bytes) -> Allocation:
        """Return the memory that another process exported as `handle`, mapped here.

        Raises:
            TransportUnavailableError: it is this process's own, or of a device that this one cannot reach.
        """
        ...

    def close(self, allocation: Allocation) -> None:
        """Unmap memory of `open`."""
        ...

    def can_reach(self, uuid: str) -> bool:
        """Return whether memory of the device `uuid`, which may be this one, can be opened and used here."""
        ...

    def new_stream(self) -> Stream:
        """Return a new stream, which does not wait for the default one."""
        ...

    def end_stream(self, stream: Stream) -> None:
        """Give a stream of `new_stream` back, when its work has ended."""
        ...

    def is_capturing(self, stream: Stream) -> bool:
        """Return whether `stream` records a graph, in which nothing runs and nothing may be waited for."""
        ...

    def new_event(self, *, shared: bool = False) -> Event:
        """Return a new event, which has not been recorded; one that is `shared` may be exported.

        Of those that are shared, drivers have a limited number, and make them slowly.
        """
        ...

    def export_event(self, event: Event) -> bytes:
        """Return the handle by which other processes open an event of `new_event`."""
        ...

    def open_event(self, handle: bytes) -> Event:
        """Return the event that another process exported as `handle`; not that of this process."""
        ...

    def end_event(self, event: Event) -> None:
        """Give an event of `new_event` or `open_event` back."""
        ...

    def record(self, event: Event, stream: Stream) -> None:
        """Let `event` happen when all that was issued to `stream` so far is done."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Let what is issued to `stream` from now on wait for the last record of `event`; the host does not wait."""
        ...

    def done(self, event: Event) -> bool:
        """Return whether the last record of `event` has happened; true if there was none."""
        ...

    def copy(self, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        """Copy `nbytes`, which do not overlap, between addresses of the device or of `pin`'s memory."""
        ...

    def reduce(
        self, dst: int, sources: Sequence[int], count: int, dtype: DType, op: Op, divisor: int, stream: Stream
    ) -> None:
        """Let ``dst[i]`` be all ``sources[…][i]`` combined in their order and rounded once, for `count` elements.

        The same as `transports.reductions.reduce_into`, whose definition holds for each bit. `dst` may be one of the
        sources, and must not overlap them otherwise. An average is divided by `divisor`, where it is lowered; other
        operations ignore it.
        """
        ...

    def lift(self, dst: int, src: int, count: int, dtype: DType, op: Op, stream: Stream) -> None:
        """Let ``dst[i]`` be ``src[i]`` multiplied by the factor of `op`, for `count` elements; `dst` may be `src`.

        The same as `transports.reductions.lift`, which says what the factor may be.
        """
        ...

    def pin(self, nbytes: int) -> AnyArray:
        """Return `nbytes` of host memory, as uint8, that the device copies to and from while the host goes on."""
        ...

    def unpin(self, array: AnyArray) -> None:
        """Give memory of `pin` back."""
        ...

    def facts(self, pointer: int) -> PointerFacts:
        """Return what the driver knows of an address; that of ordinary memory of the host is no error."""
        ...

    def abort(self) -> None:
        """Let nothing more be issued; never waits, from any thread."""
        ...
