"""The contracts between the parts of device calls: a route, and the calls that a route makes on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from unisono.collectives.calls.planning import CallSpec
from unisono.collectives.device.work import CheckedDeviceCall
from unisono.errors import UnisonoError
from unisono.foundation.deadlines import Deadline
from unisono.transports.contracts.call import AnyArray, Call
from unisono.transports.contracts.transport import Traffic
from unisono.transports.cuda.device import Event

# The counts of a vector collective, in elements: one tuple, or one for INPUT and one for OUTPUT; None for equal shares.
Counts: TypeAlias = "tuple[tuple[int, ...], ...] | None"


class HostCalls(Protocol):
    """A communicator, as a route uses it for calls on host memory."""

    def _call_on_host(
        self, spec: CallSpec, x: AnyArray | None, out: AnyArray | None, counts: Counts, timeout_s: float, /
    ) -> None:
        """Make a call on flat numpy arrays, with the collective, op, root and algorithm of `spec` (not its layout)."""

    def _call_of(self, spec: CallSpec, elements: int, /) -> Call:
        """Return the call that `_call_on_host` makes for an INPUT of `elements` elements."""

    def subgroup(self, ranks: Sequence[int], /) -> HostCalls:
        """Return a communicator of these ranks, which call it all."""

    def stats(self) -> Mapping[int, Traffic]:
        """Return the traffic so far, by peer."""


class Route(Protocol):
    """A means to bring the data of a call from the GPUs of some ranks to those of others, such as CUDA IPC or NCCL."""

    def refuses(self, call: CheckedDeviceCall) -> str | None:
        """Return the reason why a call cannot take this route, as text; None if it can. It is equal on all ranks."""

    def issue(self, call: CheckedDeviceCall, ready: Sequence[Event], finished: Event, deadline: Deadline) -> None:
        """Issue all work of a call to the device, and block while other ranks are needed for that.

        The work waits for the events `ready`. `finished` is recorded behind it. If this raises an error, `finished` is
        recorded behind the work issued so far, and the arrays are in use until it happens.

        Raises:
            MismatchError, PeerLostError, CollectiveTimeoutError, AbortedError: the call failed.
        """

    def fail(self, error: UnisonoError) -> None:
        """End all calls of this route on this rank, so that no stream waits for other ranks any more."""

    def is_intact(self) -> bool:
        """Return whether the results of calls are valid.

        They are not if a stream stopped waiting for another rank by `fail`.
        """

    def close(self, deadline: Deadline) -> None:
        """Release streams and memory once the device has done the issued work.

        At the deadline, what the device still uses is kept.
        """
