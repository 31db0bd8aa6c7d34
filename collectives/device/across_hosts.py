"""The route of calls on GPU arrays across hosts: GPUs reduce within a host, and the host's links join the hosts.

Theory of operation
-------------------
Every host has the same number p of ranks. The ranks with the same index on their hosts form a *rail*. An allreduce has
three phases:

1. The GPUs of a host reduce over mapped memory: each rank gets 1/p of the host's result (reduce_scatter).
2. Each rank reduces its part with its rail, through pinned memory, so that 1/p of the bytes leave by each rank.
3. The GPUs of a host gather the parts over mapped memory (allgather).

The vector is cut into segments, and there are two slots, so that the phases of neighbouring segments overlap:

    within hosts (1)   0  1  2  3
    rail (2)              0  1  2  3
    within hosts (3)         0  1  2  3

Phases 1 and 3 have a stream and mapped memory of their own each. The host waits for phase 1 of a segment, because it
exchanges what that has computed, and for nothing else from the device. Up to p - 1 elements at the end, which cannot be
divided among the ranks of a host, are a last segment that all ranks reduce through pinned memory.

An average is a sum in both phases. Each rank divides its part when it is back on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from unisono.collectives.calls.planning import CallSpec, as_request
from unisono.collectives.calls.prepared import BoundArray
from unisono.collectives.custom_ops.functions import is_by_function
from unisono.collectives.device.contracts import HostCalls
from unisono.collectives.device.routes import address_of
from unisono.collectives.device.work import CheckedDeviceCall
from unisono.deadlines import Deadline
from unisono.dtypes import DType
from unisono.errors import UnisonoError
from unisono.operations import OPERATIONS, Lower, Op, operation
from unisono.transports.contracts.call import Extent, Signature
from unisono.transports.contracts.executor import Executor
from unisono.transports.contracts.transport import Traffic
from unisono.transports.cuda.device import Allocation, Device, Event, Stream
from unisono.transports.cuda.ipc import DeviceCollectives
from unisono.transports.cuda.peer_exchange import exchange
from unisono.transports.cuda.staging import Pinned, await_event
from unisono.transports.reductions.definition import numpy_dtype

# Bytes of the whole vector that are in one segment, and of a slab of mapped memory.
SEGMENT_NBYTES = 4 << 20
_SLAB_NBYTES = 4 << 20

Hosts: TypeAlias = "Sequence[Sequence[int]]"


def refuses_hosts(hosts: Hosts) -> str | None:
    """Return the reason why ranks on these hosts cannot take the route, as text; None if they can."""
    sizes = {len(ranks) for ranks in hosts}
    if len(sizes) > 1:
        return f"the hosts have different numbers of ranks: {', '.join(map(str, map(len, hosts)))}"
    if len(hosts) < 2:
        return "all ranks are on one host"
    return "each host has one rank" if sizes == {1} else None


class Within(Protocol):
    """Collectives of the GPUs of one host.

    Attributes:
        refusal: why the ranks of the host cannot use them; None if they can. Equal on all of them.
    """

    refusal: str | None

    def issue(
        self, signature: Signature, extent: Extent, source: int, target: int, stream: Stream, deadline: Deadline
    ) -> None:
        """Issue a call on flat contiguous arrays to a stream; blocks while other ranks are needed for that."""

    def check(self, operation: str) -> None:
        """Raise the error that prevents a new call, if any."""

    def fail(self, error: UnisonoError) -> None:
        """End the communicator with `error` on all ranks; streams go on."""

    def is_intact(self) -> bool:
        """Return whether calls end with their results."""

    def traffic(self) -> Mapping[int, Traffic]:
        """Return the bytes that are known to have been moved, by rank of the host."""

    def close(self, deadline: Deadline) -> bool:
        """End this rank's part; return whether the device's work is done."""


class ByMappedMemory:
    """Calls within a host over CUDA IPC."""

    def __init__(self, executor: Executor, device: Device, deadline: Deadline) -> None:
        self._collectives = DeviceCollectives(
            executor, device, timeout_s=deadline.remaining_s(), slab_nbytes=_SLAB_NBYTES
        )
        self.refusal = self._collectives.refusal
        self.check, self.fail = self._collectives.check, self._collectives.fail
        self.is_intact, self.traffic = self._collectives.is_intact, self._collectives.traffic

    def issue(
        self, signature: Signature, extent: Extent, source: int, target: int, stream: Stream, deadline: Deadline
    ) -> None:
        self._collectives.start(signature, extent, source, target, stream).wait(deadline.remaining_s())

    def close(self, deadline: Deadline) -> bool:
        return self._collectives.close(deadline.remaining_s())


# Creates the collectives of a host; all of its ranks call it at the same point.
MakeWithin: TypeAlias = "Callable[[Executor, Device, Deadline], Within]"


class Rails:
    """The place of this rank among the hosts.

    Attributes:
        local: the ranks of its host.
        rail: the ranks of its rail, in the order of the hosts.
    """

    def __init__(self, hosts: Hosts, rank: int) -> None:
        self.local = next(ranks for ranks in hosts if rank in ranks)
        index = self.local.index(rank)
        self.rail = [ranks[index] for ranks in hosts]


class AcrossHosts:
    """The route across hosts. Every rank of the communicator creates it at the same point, where the ranks meet.

    Args:
        links: an executor of all ranks, which agree over it.
        local: an executor of the ranks of this host.
        host, rail: communicators of all ranks, and of this rank's rail, which make no other calls at the same time.
        rails: the place of this rank.
        device: the device of the arrays.
        within: creates the collectives of a host.
        name: the algorithm that a call must name to take this route; None if it must name none.
        deadline: when the ranks must have met.

    Attributes:
        refusal: why these ranks cannot use it; None if they can. Equal on all of them.
        to_host_nbytes, to_device_nbytes: the bytes copied so far.
    """

    def __init__(
        self,
        links: Executor,
        local: Executor,
        host: HostCalls,
        rail: HostCalls,
        rails: Rails,
        device: Device,
        within: MakeWithin,
        name: str | None,
        deadline: Deadline,
    ) -> None:
        self._name = name
        self._size, self._local, self._rails = links.size, local, rails
        self._host, self._rail = host, rail
        self._device = device
        self._reducing, self._gathering = within(local, device, deadline), within(local, device, deadline)
        mine = self._reducing.refusal or self._gathering.refusal
        reasons = exchange(links, mine and f"on the host of rank {rails.local[0]}, {mine}", deadline.remaining_s())
        self.refusal: str | None = next((reason for reason in reasons if reason is not None), None)
        self._inward, self._outward = device.new_stream(), device.new_stream()
        self._slots = (_Slot(device), _Slot(device))
        self._joined = device.new_event()
        self.to_host_nbytes = self.to_device_nbytes = 0

    def refuses(self, call: CheckedDeviceCall) -> str | None:
        return next((reason for array in call.checked.arrays if (reason := self._refuses_spec(array.spec))), None)

    def refuses_collective(self, collective: str) -> str | None:
        """Return the reason why no call of a collective can take this route, as text; None if some calls can."""
        if self.refusal is not None:
            return self.refusal
        return None if collective == "allreduce" else f"only allreduce reduces within hosts, and not {collective}"

    def _refuses_spec(self, spec: CallSpec) -> str | None:
        request = as_request(spec.algorithm)
        reasons = (
            (is_by_function(spec.op), "reductions by functions of Python are done on the host"),
            (
                request.reproducible or request.accumulate is not None,
                "only the host supports reproducible=True and accumulate",
            ),
            (request.algorithm not in (None, self._name or "auto"), f"{request.algorithm} is named"),
        )
        refusal = next((reason for applies, reason in reasons if applies), None)
        return refusal or self.refuses_collective(spec.collective)

    def issue(self, call: CheckedDeviceCall, ready: Sequence[Event], finished: Event, deadline: Deadline) -> None:
        for event in ready:
            self._device.wait(self._inward, event)
            self._device.wait(self._outward, event)
        try:
            for array in call.checked.arrays:
                self._issue_array(array, deadline)
        finally:
            self._device.record(self._joined, self._inward)
            self._device.wait(self._outward, self._joined)
            self._device.record(finished, self._outward)

    def _issue_array(self, array: BoundArray, deadline: Deadline) -> None:
        reduction = _Reduction(array)
        segments = self._segments(reduction)
        self._fetch(0, segments, reduction, deadline)
        for index, segment in enumerate(segments):
            self._fetch(index + 1, segments, reduction, deadline)
            self._pass_on(segment, self._slots[index % 2], reduction, deadline)

    def _segments(self, reduction: _Reduction) -> list[_Segment]:
        ranks = len(self._rails.local)
        most = max(ranks, SEGMENT_NBYTES // reduction.dtype.itemsize // ranks * ranks)
        whole = reduction.count // ranks * ranks
        segments = [_Segment(first, min(most, whole - first), ranks) for first in range(0, whole, most)]
        if reduction.count > whole:
            segments.append(_Segment(whole, reduction.count - whole, 1))
        return segments

    def _fetch(self, index: int, segments: Sequence[_Segment], reduction: _Reduction, deadline: Deadline) -> None:
        """Issue phase 1 of segment `index`, and the copy of this rank's part to the host; nothing behind the last."""
        if index >= len(segments):
            return
        segment, slot, itemsize = segments[index], self._slots[index % 2], reduction.dtype.itemsize
        nbytes = segment.part * itemsize
        slot.reserve(nbytes, lambda event: self._await(event, deadline))
        self._device.wait(self._inward, slot.stored)  # the segment before last has left the slot
        source = reduction.source + segment.first * itemsize
        if segment.ways > 1:
            op = reduction.partial
            signature = Signature("reduce_scatter", reduction.dtype.name, (segment.length,), "C", op.name, None, "", 1)
            extent = Extent((segment.length, segment.part), reduction.dtype, op)
            self._reducing.issue(signature, extent, source, slot.pointer, self._inward, deadline)
            source = slot.pointer
        self._device.copy(slot.address, source, nbytes, self._inward)
        self._device.record(slot.fetched, self._inward)
        self.to_host_nbytes += nbytes

    def _pass_on(self, segment: _Segment, slot: _Slot, reduction: _Reduction, deadline: Deadline) -> None:
        """Make phase 2 of a segment, and issue phase 3."""
        itemsize = reduction.dtype.itemsize
        nbytes = segment.part * itemsize
        self._await(slot.fetched, deadline)
        values = slot.host.of(nbytes).view(numpy_dtype(reduction.dtype))
        spec, target = reduction.spec._replace(algorithm=None), reduction.target + segment.first * itemsize
        self.to_device_nbytes += nbytes
        if segment.ways == 1:
            self._host._call_on_host(spec, values, values, None, deadline.remaining_s())
            self._device.copy(target, slot.address, nbytes, self._outward)
        else:
            between = spec._replace(op=reduction.between)
            self._rail._call_on_host(between, values, values, None, deadline.remaining_s())
            self._device.copy(slot.pointer, slot.address, nbytes, self._outward)
            self._gather(segment, slot.pointer, target, reduction, deadline)
        self._device.record(slot.stored, self._outward)

    def _gather(self, segment: _Segment, part: int, target: int, reduction: _Reduction, deadline: Deadline) -> None:
        dtype = reduction.dtype
        if reduction.op.lower is Lower.DIVIDE_BY_SIZE:
            self._device.reduce(part, [part], segment.part, dtype, reduction.op, self._size, self._outward)
        signature = Signature("allgather", dtype.name, (segment.part,), "C", None, None, "", 1)
        extent = Extent((segment.part, segment.length), dtype, None)
        self._gathering.issue(signature, extent, part, target, self._outward, deadline)

    def _await(self, event: Event, deadline: Deadline) -> None:
        """Block until an event has happened, and raise the error of another rank that became known meanwhile.

        `await_event` drops such an error if the event happens. But each error is raised once, and the next call on the
        host would then fail without its cause.
        """
        errors: list[UnisonoError] = []

        def check() -> None:
            try:
                self._reducing.check("allreduce")
            except UnisonoError as error:
                errors.append(error)
                raise

        await_event(self._device, event, deadline, check, self.is_intact)
        if errors:
            raise errors.pop()

    def fail(self, error: UnisonoError) -> None:
        self._reducing.fail(error)
        self._gathering.fail(error)

    def is_intact(self) -> bool:
        return self._reducing.is_intact() and self._gathering.is_intact()

    def traffic(self) -> Mapping[int, Traffic]:
        """Return the bytes moved over CUDA IPC, by peer."""
        total: dict[int, Traffic] = {}
        for collectives in (self._reducing, self._gathering):
            for peer, more in collectives.traffic().items():
                rank = self._rails.local[peer]
                total[rank] = total[rank] + more if rank in total else more
        return total

    def close(self, deadline: Deadline) -> None:
        are_over = [each.close(deadline) for each in (self._reducing, self._gathering)]
        if not all(are_over):
            return  # what the device still uses may not be freed
        try:
            for slot in self._slots:
                await_event(self._device, slot.fetched, deadline)
                await_event(self._device, slot.stored, deadline)
        except UnisonoError:
            return
        for slot in self._slots:
            slot.close()
        self._device.end_event(self._joined)
        for stream in (self._inward, self._outward):
            self._device.end_stream(stream)


class _Segment(NamedTuple):
    """Consecutive elements, and among how many ranks of a host they are divided."""

    first: int
    length: int
    ways: int

    @property
    def part(self) -> int:
        """The number of elements that this rank exchanges with other hosts."""
        return self.length // self.ways


class _Reduction:
    """An allreduce of one array.

    Attributes:
        spec, dtype, op, count: of the call.
        source, target: the addresses of INPUT and OUTPUT.
        partial: the operation within hosts.
        between: the operation between hosts.
    """

    def __init__(self, array: BoundArray) -> None:
        spec = array.spec
        assert spec.dtype is not None, "an array has a dtype"
        assert spec.op is not None, "an allreduce has an operation"
        assert spec.layout is not None, "a call on a device has an array"
        self.spec = spec
        self.dtype: DType = spec.dtype
        self.op: Op = operation(spec.op)
        self.count = spec.layout.elements[0]
        self.source, self.target = address_of(array.source), address_of(array.target)
        is_sum = self.op.lower is Lower.DIVIDE_BY_SIZE or self.op.factor is not None
        self.between: Op = OPERATIONS["sum"] if is_sum else self.op
        self.partial: Op = self.op if self.op.factor is not None else self.between


class _Slot:
    """Memory for this rank's part of a segment, on the device and on the host.

    Attributes:
        host: the pinned memory.
        fetched, stored: events behind the copy to the host, and behind the last use of the slot.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._allocation: Allocation | None = None
        self._nbytes = 0
        self.host = Pinned(device)
        self.fetched, self.stored = device.new_event(), device.new_event()

    @property
    def pointer(self) -> int:
        """The address on the device."""
        assert self._allocation is not None, "`reserve` has been called"
        return self._allocation.pointer

    @property
    def address(self) -> int:
        """The address on the host."""
        return self.host.of(self._nbytes).ctypes.data

    def reserve(self, nbytes: int, wait: Callable[[Event], None]) -> None:
        """Make the slot at least this large. ``wait(event)`` blocks until earlier uses are over, if it must grow."""
        if nbytes > self._nbytes:
            wait(self.stored)
            self.free()
            self._allocation = self._device.allocate(nbytes)
            self._nbytes = nbytes
            self.host.of(nbytes)

    def free(self) -> None:
        """Free the memory, which the device must not use any more."""
        if self._allocation is not None:
            self._device.free(self._allocation)
        self._allocation = None

    def close(self) -> None:
        """Free everything."""
        self.free()
        self.host.close()
        for event in (self.fetched, self.stored):
            self._device.end_event(event)
