"""Works of calls on GPU arrays. Such a call ends at an event on the device, and streams wait for that event."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from unisono.collectives.calls.prepared import CheckedCall
from unisono.collectives.calls.work import Work, Works
from unisono.collectives.device.adapters import DeviceArrays
from unisono.collectives.device.events import Events
from unisono.errors import UsageError
from unisono.foundation.deadlines import Deadline
from unisono.transports.contracts.executor import Operation
from unisono.transports.cuda.device import Device, Event, Stream, is_over
from unisono.transports.cuda.executors.replays import Replays
from unisono.transports.cuda.executors.staging import await_event
from unisono.transports.cuda.peers.shown_arrays import Shown

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class CheckedDeviceCall:
    """A call whose arguments this rank has checked, and its GPU arrays; a persistent call has a plan."""

    checked: CheckedCall
    memory: DeviceArrays
    plan: DevicePlan | None = None


@dataclass(slots=True)
class DevicePlan:
    """The agreement of the ranks about a persistent call, made at its first use.

    Attributes:
        number: counts the persistent calls of a communicator that have been used; 0 before the first use. The same
            number means the same persistent call on all ranks.
        shown: for each array, where the ranks read the arrays of others; None before the first use over CUDA IPC.
        replays: for each array, its graphs; None if it has none.
    """

    number: int = 0
    shown: Sequence[Shown | None] | None = None
    replays: Sequence[Replays | None] = ()


class Arrival:
    """The point at which the device has done all work of a call: an event behind that work.

    The arrays stay alive as long as this object. Its end gives the event back, and those of `recorded`.

    Attributes:
        device, event: the event and its device.
        is_issued: whether all work has been issued, or no more will be because issuing failed.
    """

    def __init__(
        self, device: Device, call: CheckedDeviceCall, events: Events, streams: Sequence[Stream] | None = None
    ) -> None:
        """Create an arrival. `streams` are those of the arrays if the program cannot change them before `order`."""
        self.device = device
        self._streams = streams
        self._events = events
        self.event = events.take()
        self._earlier: list[Event] = []
        self.is_issued = False
        self._call = call

    def __del__(self) -> None:
        """Give the events back, all of which have happened."""
        for event in (self.event, *self._earlier):
            self._events.give_back(event)

    def recorded(self, stream: Stream) -> Event:
        """Return an event behind the work that a stream has now, which the work of the call waits for."""
        event = self._events.take()
        self._earlier.append(event)
        self.device.record(event, stream)
        return event

    def order(self) -> None:
        """Make later work of the streams on which the arrays are used wait for this point."""
        with self.device.current():
            streams, self._streams = self._streams, None
            try:
                streams = self._call.memory.streams() if streams is None else streams
            except UsageError:  # one of them records a graph, which matters only if it has to wait
                if self.device.done(self.event):
                    return
                raise
            for stream in streams:
                self.device.wait(stream, self.event)

    def is_over(self) -> bool:
        """Return whether the device has done all of the call; does not block."""
        return self.is_issued and is_over(self.device, self.event)


class InUse(Protocol):
    """Memory that a device may still use."""

    def is_over(self) -> bool:
        """Return whether the device has stopped using this memory. It does not block."""


# Memory that a device still used when its communicator ended. After a rank was killed, that may never change.
_LATE: list[InUse] = []


def keep_late(pending: Iterable[InUse]) -> None:
    """Keep memory alive as long as the device uses it, although its communicator is being closed."""
    _LATE[:] = [memory for memory in (*_LATE, *pending) if not memory.is_over()]


class DeviceWork(Work[Result]):
    """A call on GPU arrays. The program must not use the arrays before the streams wait for its end: see `wait`."""

    __slots__ = ("_arrival", "_check", "_is_intact")

    def __init__(
        self,
        works: Works,
        operation: Operation,
        limit_s: float,
        finish: Callable[[], Result],
        arrival: Arrival,
        check: Callable[[], None],
        is_intact: Callable[[], bool],
    ) -> None:
        """Create the work of a call.

        ``check()`` raises the error of another rank, if there is one. ``is_intact()`` returns whether the device ends
        calls with their results, and not without them after such an error.
        """
        super().__init__(works, operation, None, limit_s, lambda _: finish())
        self._arrival = arrival
        self._check = check
        self._is_intact = is_intact
        self.is_counted = False

    def done(self) -> bool:
        """Return whether the device has done all of the call, or the call has failed; does not block."""
        return super().done() and is_over(self._arrival.device, self._arrival.event)

    def wait(self, timeout_s: float | None = None) -> Result:
        """Wait until the call has been issued to the device, make the caller's streams wait for its end, and return.

        The streams are those that are current in this thread, or that the arrays name. The host does not wait for them.
        Arguments and errors are those of `Work.wait`.
        """
        result = super().wait(timeout_s)
        self._arrival.order()
        return result

    def synchronize(self, timeout_s: float | None = None) -> Result:
        """Do the same as `wait`, and then wait until the device has done all of the call.

        Raises:
            CollectiveTimeoutError: the device has not done it in time; the call goes on.
            PeerLostError: another rank was lost before the device had done it. Also the errors of `wait`.
        """
        deadline = Deadline(self._seconds(timeout_s))
        result = self.wait(timeout_s)
        await_event(self._arrival.device, self._arrival.event, deadline, self._check, self._is_intact)
        return result
