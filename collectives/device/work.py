"""Works of calls on arrays of a GPU: their ends are points in the work of the device, for which streams wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from unisono.collectives.calls.prepared import CheckedCall
from unisono.collectives.calls.work import Work, Works
from unisono.collectives.device.adapters import DeviceArrays
from unisono.deadlines import Deadline
from unisono.transports.contracts.executor import Operation
from unisono.transports.cuda.device import Device, Event
from unisono.transports.cuda.staging import await_event

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class DeviceCall:
    """A call that is right as far as this rank can tell, and its arrays."""

    checked: CheckedCall
    memory: DeviceArrays


class Arrival:
    """The point at which the device has done all of a call: an event that is recorded when all has been issued.

    Attributes:
        device, event: the event, which is given back when nothing holds this any more; nor are the arrays, before.
        is_issued: whether all has been issued, or nothing more will be.
    """

    def __init__(self, device: Device, call: DeviceCall, event: Event) -> None:
        self.device = device
        self.event = event
        self.is_issued = False
        self._call = call

    def __del__(self) -> None:
        """Give the event back."""
        self.device.end_event(self.event)

    def order(self) -> None:
        """Let what the caller issues from now on, to the streams that the arrays are used on, wait for this point."""
        if not self.device.done(self.event):
            for stream in self._call.memory.streams():
                self.device.wait(stream, self.event)

    def is_over(self) -> bool:
        """Return whether the device has done all of the call; does not block."""
        return self.is_issued and self.device.done(self.event)


class InUse(Protocol):
    """Memory that a device uses."""

    def is_over(self) -> bool:
        """Return whether it is done with it; does not block."""


# What a device was not done with when its communicator ended: behind work of a rank that was killed, for ever.
_LATE: list[InUse] = []


def keep_late(pending: Iterable[InUse]) -> None:
    """Keep alive what a device uses, of a communicator that ends."""
    _LATE[:] = [each for each in (*_LATE, *pending) if not each.is_over()]


class DeviceWork(Work[Result]):
    """A call on arrays of a GPU. They must not be changed nor read before the streams wait for its end: see `wait`."""

    __slots__ = ("_arrival", "_check")

    def __init__(
        self,
        works: Works,
        operation: Operation,
        limit_s: float,
        finish: Callable[[], Result],
        arrival: Arrival,
        check: Callable[[], None],
    ) -> None:
        """Make the work of a call; ``check()`` raises what has befallen other ranks."""
        super().__init__(works, operation, None, limit_s, lambda _: finish())
        self._arrival = arrival
        self._check = check
        self.is_counted = False

    def done(self) -> bool:
        """Return whether the device has done all of the call, or it has failed; does not block."""
        return super().done() and self._arrival.device.done(self._arrival.event)

    def wait(self, timeout_s: float | None = None) -> Result:
        """Wait until all of the call has been issued to the device, let the caller's streams wait for its end, return.

        The streams are those that are current in this thread, or that the arrays name; the host does not wait for them.
        For the rest see `Work.wait`.
        """
        result = super().wait(timeout_s)
        self._arrival.order()
        return result

    def synchronize(self, timeout_s: float | None = None) -> Result:
        """Do what `wait` does, and wait until the device has done all of the call.

        Raises:
            CollectiveTimeoutError: it has not in time; the call goes on.
            PeerLostError: it has not, and another rank has been lost. Any other error as `wait`.
        """
        deadline = Deadline(self._seconds(timeout_s))
        result = self.wait(timeout_s)
        await_event(self._arrival.device, self._arrival.event, deadline, self._check)
        return result
