"""The two ways of a call between devices: over CUDA IPC, and staged through the host.

Both issue a call to streams of their own, behind events of the caller's, and record another event behind all of it. The
calls of a communicator are issued one after the other, by one thread at a time, in the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol, TypeAlias

from unisono.collectives.calls.planning import CallPlanner, CallSpec, as_request
from unisono.collectives.calls.prepared import BoundArray
from unisono.collectives.custom_ops.functions import is_by_function
from unisono.collectives.device.segments import Run, Segment, segments_of
from unisono.collectives.device.work import DeviceCall
from unisono.deadlines import Deadline
from unisono.transports.contracts.call import AnyArray
from unisono.transports.contracts.executor import Executor
from unisono.transports.contracts.transport import Traffic
from unisono.transports.cuda import staging
from unisono.transports.cuda.device import Device, Event
from unisono.transports.cuda.ipc import DeviceCollectives
from unisono.transports.cuda.staging import Piece
from unisono.transports.reductions.definition import numpy_dtype

# Bytes of the whole vector that are staged at once.
SEGMENT_NBYTES = 4 << 20
# How long what is left of a time limit is at least: that it is over is found by who waits.


# What is given as the counts of a call, in elements; None for equal shares.
Counts: TypeAlias = "tuple[tuple[int, ...], ...] | None"


class HostCalls(Protocol):
    """A communicator, as calls on the host are made there."""

    def _call_on_host(
        self, kind: CallSpec, x: AnyArray | None, out: AnyArray | None, counts: Counts, timeout_s: float
    ) -> None:
        """Make a call of this kind, but for its layout, on flat arrays of numpy."""


class Route(Protocol):
    """A way."""

    def refuses(self, call: DeviceCall) -> str | None:
        """Return why a call cannot take this way; None if it can. Equal on all ranks."""

    def issue(self, call: DeviceCall, ready: Sequence[Event], finished: Event, deadline: Deadline) -> None:
        """Issue all of a call behind the events `ready`, and record `finished` behind that; blocks for other ranks.

        If it fails, `finished` is behind what had been issued by then: until it happens, the arrays are in use.

        Raises:
            MismatchError, PeerLostError, CollectiveTimeoutError, AbortedError: the call failed.
        """

    def close(self, deadline: Deadline) -> None:
        """Give everything back, when the device has done what was issued, or at the deadline what can be."""


class ByIpc:
    """The way over CUDA IPC; each rank of the communicator makes this at the same point, and they meet."""

    def __init__(self, executor: Executor, calls: CallPlanner, device: Device, timeout_s: float) -> None:
        self._calls = calls
        self._device = device
        self._collectives = DeviceCollectives(executor, device, timeout_s=timeout_s)
        self._stream = device.new_stream()

    def refuses(self, call: DeviceCall) -> str | None:
        """See `Route.refuses`."""
        return next((reason for part in call.checked.parts if (reason := self.refuses_kind(part.kind))), None)

    def refuses_collective(self, collective: str) -> str | None:
        """Return why no call of a collective can take this way; None if there are some that can."""
        return self._collectives.refuses(collective)

    def refuses_kind(self, kind: CallSpec) -> str | None:
        """Return why a call on one array of this kind cannot take this way; None if it can."""
        wanted = as_request(kind.algorithm)
        reasons = (
            (is_by_function(kind.op), "reductions by functions of Python are done on the host"),
            (kind.layout is not None and kind.layout.rows is not None, "shares of their own length are staged"),
            (wanted.reproducible or wanted.accumulate is not None, "orders that are asked for are kept on the host"),
        )
        told = next((reason for applies, reason in reasons if applies), None)
        return told or self._collectives.refuses(kind.collective, wanted.algorithm)

    def issue(self, call: DeviceCall, ready: Sequence[Event], finished: Event, deadline: Deadline) -> None:
        """See `Route.issue`."""
        for event in ready:
            self._device.wait(self._stream, event)
        try:
            for part in call.checked.parts:
                self._issue(part, deadline)
        finally:
            self._device.record(finished, self._stream)

    def _issue(self, part: BoundArray, deadline: Deadline) -> None:
        made = self._calls.find(part.kind)
        operation = self._collectives.start(
            made.signature,
            made.extents[0],
            _address(part.source),
            _address(part.target),
            self._stream,
            as_request(part.kind.algorithm).algorithm,
        )
        operation.wait(deadline.left_s())

    def traffic(self) -> Mapping[int, Traffic]:
        """Return the bytes that have gone this way, by peer."""
        return self._collectives.traffic()

    def close(self, deadline: Deadline) -> None:
        """See `Route.close`."""
        if self._collectives.close(deadline.left_s()):
            self._device.end_stream(self._stream)


class Staged:
    """The way through the host, which takes every call.

    Args:
        executor: of the communicator.
        host: a communicator of the same ranks without other calls.
        device: the device.
    """

    def __init__(self, executor: Executor, host: HostCalls, device: Device) -> None:
        self._rank, self._size = executor.rank, executor.size
        self._host = host
        self._staging = staging.Staging(device)

    def refuses(self, call: DeviceCall) -> str | None:
        """See `Route.refuses`."""
        return None

    def issue(self, call: DeviceCall, ready: Sequence[Event], finished: Event, deadline: Deadline) -> None:
        """See `Route.issue`."""
        segments = [each for part in call.checked.parts for each in self._segments(part, call, deadline)]
        self._staging.run(segments, ready, finished, deadline)

    def copied_nbytes(self) -> tuple[int, int]:
        """Return how many bytes have been copied to the host, and from there."""
        return self._staging.to_host_nbytes, self._staging.to_device_nbytes

    def close(self, deadline: Deadline) -> None:
        """See `Route.close`."""
        self._staging.close(deadline)

    def _segments(self, part: BoundArray, call: DeviceCall, deadline: Deadline) -> list[staging.Segment]:
        """Return the segments of one array."""
        kind = part.kind
        assert kind.layout is not None, "a call on a device has an array"
        assert kind.dtype is not None, "an array has a dtype"
        itemsize = kind.dtype.itemsize
        cut = segments_of(kind.collective, kind.layout, self._size, max(1, SEGMENT_NBYTES // itemsize))
        # To a prefix of no ranks nothing is written, but into a new array, where it is of zeros.
        is_kept = kind.collective == "exscan" and self._rank == 0 and not call.memory.has_made(part.result)
        return [
            staging.Segment(
                _pieces(part.source, each.reads, itemsize),
                _pieces(part.target, each.writes, itemsize, is_kept=is_kept),
                partial(self._exchange, part, each, deadline),
            )
            for each in cut
        ]

    def _exchange(
        self, part: BoundArray, segment: Segment, deadline: Deadline, source: AnyArray, target: AnyArray
    ) -> None:
        """Make the call of a segment on the host."""
        kind = part.kind
        assert kind.dtype is not None, "a call on a device has an array"
        dtype = numpy_dtype(kind.dtype)
        if kind.collective == "exscan":
            target[...] = 0
        out = target.view(dtype) if part.target is not None else None
        # Who only receives a broadcast gives memory for it.
        x = source.view(dtype) if part.source is not None else out if kind.collective == "broadcast" else None
        self._host._call_on_host(kind, x, out, segment.counts, deadline.left_s())


def _address(array: AnyArray | None) -> int:
    return 0 if array is None else array.ctypes.data


def _pieces(array: AnyArray | None, runs: Sequence[Run], itemsize: int, *, is_kept: bool = False) -> list[Piece]:
    """Return where elements of an array lie on the device; none if there is no array, and nowhere if it `is_kept`."""
    if array is None:
        return []
    address = array.ctypes.data
    return [(0 if is_kept else address + first * itemsize, count * itemsize) for first, count in runs]
