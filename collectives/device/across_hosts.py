"""The route of calls on GPU arrays across hosts: GPUs work within a host, and the host's links join the hosts.

Theory of operation
-------------------
A call has up to three phases, which `host_phases` names. An allreduce, for example, has all three:

1. The GPUs of a host reduce over mapped memory: each of the p ranks gets 1/p of the host's result (reduce_scatter).
2. Each rank reduces its part with its rail, through pinned memory, so that 1/p of the bytes leave by each rank.
3. The GPUs of a host gather the parts over mapped memory (allgather).

The arrays are cut into segments, and there are two slots, so that the phases of neighbouring segments overlap:

    within hosts (1)   0  1  2  3
    rail (2)              0  1  2  3
    within hosts (3)         0  1  2  3

If UCX knows the memory of the device, ranks of a rail exchange there, by the plan that the host would run
(`message_run`). Then nothing is copied to the host.

Phases 1 and 3 have a stream and mapped memory of their own each. The host waits for phase 1 of a segment, because it
exchanges the result, and for nothing else from the device. A kernel packs the elements of a segment that do not follow
each other, and one unpacks them.

An average is a sum in phases 1 and 2. Each rank divides its part once, when the result of phase 2 is on the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unisono.algorithms.ir.contracts import CONTRACTS
from unisono.collectives.calls.planning import CallSpec, as_request
from unisono.collectives.calls.prepared import BoundArray
from unisono.collectives.custom_ops.functions import is_by_function
from unisono.collectives.device.contracts import HostCalls
from unisono.collectives.device.host_phases import (
    PHASES,
    Elements,
    Inside,
    PhaseSegment,
    Rails,
    Runs,
    refuses_hosts,
    segments_of,
    without,
)
from unisono.collectives.device.host_slots import Slot
from unisono.collectives.device.phased_call import Part, PhasedCall
from unisono.collectives.device.within_hosts import MakeWithin, Within
from unisono.collectives.device.work import CheckedDeviceCall
from unisono.errors import UnisonoError
from unisono.foundation.deadlines import Deadline
from unisono.transports.contracts.call import AnyArray, Extent, MemoryType, Signature
from unisono.transports.contracts.executor import Executor
from unisono.transports.contracts.transport import Traffic
from unisono.transports.cuda.device import Device, DeviceCopy, Event, Stream
from unisono.transports.cuda.executors.message_run import MessageMemory, MessageRun
from unisono.transports.cuda.executors.staging import await_event
from unisono.transports.cuda.peers.peer_exchange import exchange
from unisono.transports.reductions.definition import numpy_dtype

# Bytes of the whole vector that are in one segment.
SEGMENT_NBYTES = 4 << 20
# Less memory of a call between hosts goes through the host: transports do not send small messages from a device.
LEAST_DIRECT_NBYTES = 16 << 10
# The bytes of a message that is not small.
_LARGE_NBYTES = 1 << 20


class AcrossHosts:
    """The route across hosts. Every rank of the communicator creates it at the same point, where the ranks meet.

    Args:
        links: an executor of all ranks, which agree over it.
        local: an executor of the ranks of this host.
        host, rail: communicators of all ranks, and of this rank's rail, which make no other calls at the same time.
        rail_links: an executor of this rank's rail, for messages in memory of the device. Both are None without a rail.
        rails: the place of this rank.
        device: the device of the arrays.
        within: creates the collectives of a host.
        name: the algorithm that a call must name to take this route; None if it must name none.
        deadline: when the ranks must have met.

    Attributes:
        refusal: why these ranks cannot use it; None if they can. Equal on all of them.
        detour: why ranks of rails exchange through pinned memory; None if the transport takes memory of the device.
            Equal on all ranks.
    """

    def __init__(
        self,
        links: Executor,
        local: Executor,
        host: HostCalls,
        rail: HostCalls | None,
        rail_links: Executor | None,
        rails: Rails,
        device: Device,
        within: MakeWithin,
        name: str | None,
        deadline: Deadline,
    ) -> None:
        self._name = name
        self._local, self._rails = local, rails
        self._host, self._rail = host, rail
        self._device = device
        self._entering, self._leaving = within(local, device, deadline), within(local, device, deadline)
        self._rail_links, self._messages = rail_links, MessageMemory(device)
        refusal = self._entering.refusal or self._leaving.refusal
        mine = refusal and f"on the host of rank {rails.local[0]}, {refusal}", self._obstacle(deadline)
        refusals, detours = zip(*exchange(links, mine, deadline.remaining_s()), strict=True)
        self.refusal: str | None = next((reason for reason in refusals if reason is not None), None)
        self.detour: str | None = next((reason for reason in detours if reason is not None), None)
        self._inward, self._outward = device.new_stream(), device.new_stream()
        self._slots = (Slot(device), Slot(device))
        self._joined = device.new_event()
        self._to_host_nbytes = self._to_device_nbytes = 0

    @property
    def to_host_nbytes(self) -> int:
        """The bytes copied to the host so far."""
        return self._to_host_nbytes + self._messages.to_host_nbytes

    @property
    def to_device_nbytes(self) -> int:
        """The bytes copied from the host so far."""
        return self._to_device_nbytes + self._messages.to_device_nbytes

    def explain(self) -> str:
        """Return how GPU arrays travel, as text."""
        within = "cuda_ipc within each host" if self._name is None else "NCCL within each host"
        if self.detour is None:
            return f"{within}, and ucx with cuda between hosts"
        return f"{within}, and staged through the host between hosts, as {self.detour}"

    def _obstacle(self, deadline: Deadline) -> str | None:
        """Return the reason why this rank cannot exchange memory of the device with its rail, as text; None if it can.

        It opens the channels, because each of them may choose another transport.
        """
        links = self._rail_links
        if links is None:
            return None
        for peer in (peer for peer in range(links.size) if peer != links.rank):
            sends = links.sends_from(MemoryType.CUDA, peer, _LARGE_NBYTES, deadline.remaining_s())
            if not sends or not links.receives_into(MemoryType.CUDA, peer, _LARGE_NBYTES):
                way, ends = links.links()[peer], (self._rails.rank, self._rails.rail[peer])
                return f"the link between ranks {ends[0]} and {ends[1]} does not carry memory of a GPU: {way}"
        return None

    def refuses(self, call: CheckedDeviceCall) -> str | None:
        return next((reason for array in call.checked.arrays if (reason := self._refuses_spec(array.spec))), None)

    def refuses_collective(self, collective: str) -> str | None:
        """Return the reason why no call of a collective can take this route, as text; None if some calls can."""
        if self.refusal is not None:
            return self.refusal
        if collective not in PHASES:
            return f"there is no {collective} by phases within hosts"
        return refuses_hosts(self._rails.hosts, collective)

    def _refuses_spec(self, spec: CallSpec) -> str | None:
        request = as_request(spec.algorithm)
        reasons = (
            (is_by_function(spec.op), "reductions by functions of Python are done on the host"),
            (spec.layout is not None and spec.layout.rows is not None, "vector collectives are staged"),
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
            parts = [part for array in call.checked.arrays for part in self._parts(array)]
            self._fetch(0, parts, deadline)
            for index, part in enumerate(parts):
                self._fetch(index + 1, parts, deadline)
                self._pass_on(part, self._slots[index % 2], deadline)
        finally:
            self._device.record(self._joined, self._inward)
            self._device.wait(self._outward, self._joined)
            self._device.record(finished, self._outward)

    def _parts(self, array: BoundArray) -> list[Part]:
        call = PhasedCall(array, self._rails)
        most = SEGMENT_NBYTES // call.dtype.itemsize
        return [Part(call, segment) for segment in segments_of(call.collective, call.whole, self._rails, most)]

    def _fetch(self, index: int, parts: Sequence[Part], deadline: Deadline) -> None:
        """Issue phase 1 of segment `index`, and the copy of its result to the host.

        If there is no such segment, do nothing.
        """
        if index >= len(parts):
            return
        (call, segment), slot = parts[index], self._slots[index % 2]
        is_pinned = not self._is_direct(parts[index])
        slot.reserve(*parts[index].region_nbytes(), lambda event: self._await(event, deadline), pinned=is_pinned)
        self._device.wait(self._inward, slot.stored)  # the segment before last has left the slot
        between, inside = slot.between + call.nbytes(segment.between.source[0]), call.phases.inward
        if segment.inward is not None and call.takes_part(inside):
            source = self._packed(call, segment, slot)
            target = slot.turned if segment.turned else between
            self._make(self._entering, inside, call, segment.inward, source, target, self._inward, deadline)
            self._pack(call, between, slot.turned, segment.turned, self._inward)
        elif call.source:
            self._pack(call, between, call.source, segment.reads, self._inward)
        if is_pinned and call.sends(segment):
            for run in without(segment.between.source, segment.between.own[0]):
                start, nbytes = map(call.nbytes, run)
                self._device.copy(slot.address + start, slot.between + start, nbytes, self._inward)
                self._to_host_nbytes += nbytes
        self._device.record(slot.fetched, self._inward)

    def _packed(self, call: PhasedCall, segment: PhaseSegment, slot: Slot) -> int:
        """Return the address of the elements that a segment reads, packed together; 0 if this rank has none."""
        if call.source and len(segment.reads) > 1:
            self._pack(call, slot.packed, call.source, segment.reads, self._inward)
            return slot.packed
        return call.source and call.source + call.nbytes(segment.reads[0][0])

    def _pass_on(self, part: Part, slot: Slot, deadline: Deadline) -> None:
        """Make phase 2 of a segment, and issue phase 3."""
        call, segment = part
        self._await(slot.fetched, deadline)
        if self._is_direct(part):
            self._exchange_there(call, segment, slot, deadline)
        else:
            self._exchange(call, segment, slot, deadline)
        if call.receives(segment):
            self._arrive(part, slot)
        source, inside = slot.between + call.nbytes(segment.between.target[0]), call.phases.outward
        if segment.outward is not None and call.takes_part(inside):
            is_there = not segment.is_gathered
            target = call.target and call.target + call.nbytes(segment.writes[0][0]) if is_there else slot.gathered
            self._make(self._leaving, inside, call, segment.outward, source, target, self._outward, deadline)
            if call.target and not is_there:
                self._unpack(call, slot.gathered, segment.writes)
        elif call.target:
            self._unpack(call, source, segment.writes)
        self._device.record(slot.stored, self._outward)

    def _is_direct(self, part: Part) -> bool:
        """Return whether the ranks of a rail exchange a segment in memory of the device; equal on all ranks."""
        between = part.segment.between
        nbytes = part.call.nbytes(between.elements)
        return self.detour is None and not between.of_all and nbytes >= LEAST_DIRECT_NBYTES

    def _exchange_there(self, call: PhasedCall, segment: PhaseSegment, slot: Slot, deadline: Deadline) -> None:
        """Make the call between hosts in memory of the device, if this rank is in a rail."""
        if self._rail is None or self._rail_links is None:
            return
        between = segment.between
        planned = self._rail._call_of(call.spec_of(segment), between.source[1])
        source, target = (slot.between + call.nbytes(first) for first, _ in (between.source, between.target))
        run = MessageRun(self._rail_links, self._device, self._outward, self._messages, planned, (source, target))
        run.run(deadline)

    def _exchange(self, call: PhasedCall, segment: PhaseSegment, slot: Slot, deadline: Deadline) -> None:
        """Make the call between hosts in pinned memory."""
        between = segment.between
        memory = slot.host.of(call.nbytes(between.elements)).view(numpy_dtype(call.dtype))
        source, target = (memory[first : first + count] for first, count in (between.source, between.target))
        out = target if call.receives(segment) else None
        # A rank that only receives a broadcast passes the memory for it as `x`.
        x: AnyArray | None = source if call.sends(segment) else out if call.collective == "broadcast" else None
        if x is not None or out is not None:
            calls = self._host if between.of_all else self._rail
            assert calls is not None, "a rank without a rail neither sends nor receives"
            calls._call_on_host(call.spec_of(segment), x, out, None, deadline.remaining_s())

    def _arrive(self, part: Part, slot: Slot) -> None:
        """Issue the copy of the result between hosts to the device, and the last phase there."""
        (call, segment), is_there = part, self._is_direct(part)
        between = segment.between
        (kept, count), (target, arrived) = between.own
        if not is_there and not call.has_all(segment):
            for run in without(between.target, between.own[1]):
                start, nbytes = map(call.nbytes, run)
                self._device.copy(slot.between + start, slot.address + start, nbytes, self._outward)
                self._to_device_nbytes += nbytes
        if not is_there and count and arrived:
            dst, src = (slot.between + call.nbytes(first) for first in (target, kept))
            self._device.copy(dst, src, call.nbytes(count), self._outward)
        if call.op is not None and call.is_lowered(segment):
            at = slot.between + call.nbytes(between.target[0])
            self._device.reduce(at, [at], between.target[1], call.dtype, call.op, self._rails.size, self._outward)

    def _make(
        self,
        within: Within,
        inside: Inside | None,
        call: PhasedCall,
        elements: Elements,
        source: int,
        target: int,
        stream: Stream,
        deadline: Deadline,
    ) -> None:
        """Issue a phase inside this host."""
        assert inside is not None, "a segment with such a phase has a collective for it"
        op = call.partial if CONTRACTS[inside.collective].reduces else None
        root = call.root[1] if inside.at_root and call.root is not None else None
        name = None if op is None else op.name
        signature = Signature(inside.collective, call.dtype.name, (elements[0],), "C", name, root, "", 1)
        within.issue(signature, Extent(elements, call.dtype, op), source, target, stream, deadline)

    def _pack(self, call: PhasedCall, dst: int, src: int, runs: Runs, stream: Stream) -> None:
        """Issue copies of ranges of elements of an array to `dst`, where they lie without gaps."""
        extents = []
        for first, count in runs:
            extents.append(DeviceCopy(dst, src + call.nbytes(first), call.nbytes(count)))
            dst += call.nbytes(count)
        self._copy(extents, stream)

    def _unpack(self, call: PhasedCall, src: int, runs: Runs) -> None:
        """Issue copies of elements that lie without gaps to their places in OUTPUT."""
        extents = []
        for first, count in runs:
            extents.append(DeviceCopy(call.target + call.nbytes(first), src, call.nbytes(count)))
            src += call.nbytes(count)
        self._copy(extents, self._outward)

    def _copy(self, extents: Sequence[DeviceCopy], stream: Stream) -> None:
        if len(extents) == 1:
            self._device.copy(*extents[0], stream)
        elif extents:
            self._device.copy_extents(extents, stream)

    def _await(self, event: Event, deadline: Deadline) -> None:
        """Block until an event has happened, and raise the error of another rank that became known meanwhile.

        `await_event` drops such an error if the event happens. But each error is raised once, and the next call on the
        host would then fail without its cause.
        """
        errors: list[UnisonoError] = []

        def check() -> None:
            try:
                self._entering.check("a call across hosts")
            except UnisonoError as error:
                errors.append(error)
                raise

        await_event(self._device, event, deadline, check, self.is_intact)
        if errors:
            raise errors.pop()

    def fail(self, error: UnisonoError) -> None:
        self._entering.fail(error)
        self._leaving.fail(error)

    def is_intact(self) -> bool:
        return self._entering.is_intact() and self._leaving.is_intact()

    def traffic(self) -> Mapping[int, Traffic]:
        """Return the bytes moved over CUDA IPC, by peer."""
        total: dict[int, Traffic] = {}
        for collectives in (self._entering, self._leaving):
            for peer, more in collectives.traffic().items():
                rank = self._rails.local[peer]
                total[rank] = total[rank] + more if rank in total else more
        return total

    def close(self, deadline: Deadline) -> None:
        are_over = [each.close(deadline) for each in (self._entering, self._leaving)]
        if not all(are_over):
            return  # what the device still uses may not be freed
        if self._messages.is_torn:
            return  # nor what the transport may still use
        try:
            for slot in self._slots:
                await_event(self._device, slot.fetched, deadline)
                await_event(self._device, slot.stored, deadline)
        except UnisonoError:
            return
        self._messages.close()
        for slot in self._slots:
            slot.close()
        self._device.end_event(self._joined)
        for stream in (self._inward, self._outward):
            self._device.end_stream(stream)
