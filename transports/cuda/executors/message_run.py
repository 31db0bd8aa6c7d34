"""`MessageRun`: runs a plan of messages on memory of a device, over a transport that sends from there, such as UCX.

The plan is the one that the host would run. `Send` and `Recv` pass the address on the device to the transport. A
`RecvReduce` receives into a chunk of device memory, and a kernel combines it. `Copy` and `Reduce` are copies and
kernels. A transport knows no streams, so a step has ended only when the host has seen the end of its device work.

Messages that are too small for the transport to take them from a device, and those that have come before their receive,
pass through pinned memory. Each side decides by itself, because the messages are the same.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from unisono.algorithms.ir.plan import Buffer, Copy, Recv, RecvReduce, Reduce, Send, Span, Step
from unisono.dtypes import DTYPES
from unisono.errors import CollectiveTimeoutError
from unisono.foundation.deadlines import Deadline
from unisono.operations import Lower
from unisono.transports.contracts.call import AnyArray, Call, MemoryType
from unisono.transports.contracts.executor import Executor
from unisono.transports.cuda.device import Allocation, Device, Stream
from unisono.transports.cuda.executors.layout import BlockPlace, Layout
from unisono.transports.cuda.memory.pinned_pool import PinnedPool
from unisono.transports.executors.lane import Lane, Posted
from unisono.transports.executors.plan_checks import check_plan
from unisono.transports.executors.polling import pauses_of_polling

ABLE: tuple[type, ...] = (Send, Recv, RecvReduce, Copy, Reduce)
_BYTE = DTYPES["uint8"]


class MessageMemory:
    """Memory of a device, and pinned memory, that runs take and give back. One thread at a time uses it.

    Attributes:
        is_torn: whether a run has failed, so that the transport may still use the memory of its messages.
        to_host_nbytes, to_device_nbytes: the bytes copied so far for messages through pinned memory.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._idle: defaultdict[int, list[Allocation]] = defaultdict(list)
        self.pinned = PinnedPool(device)
        self.is_torn = False
        self.to_host_nbytes = self.to_device_nbytes = 0

    def take(self, nbytes: int) -> Allocation:
        """Return device memory of at least `nbytes` bytes."""
        room = 1 << max(0, nbytes - 1).bit_length()
        return self._idle[room].pop() if self._idle[room] else self._device.allocate(room)

    def give(self, allocation: Allocation, nbytes: int) -> None:
        """Take back memory of `take`, which no work uses any more."""
        self._idle[1 << max(0, nbytes - 1).bit_length()].append(allocation)

    def close(self) -> None:
        """Free all memory, unless a run has failed, because the transport may still use it then."""
        if self.is_torn:
            return
        for idle in self._idle.values():
            for allocation in idle:
                self._device.free(allocation)
        self._idle.clear()
        self.pinned.close()


class MessageRun:
    """The run of a plan of messages.

    Args:
        links: the executor of the ranks of the plan. It carries no other messages than those of `MessageRun`.
        device, stream: where its copies and kernels run.
        memory: lends the run its device memory and pinned memory.
        call: the call, with its plan and extents.
        operands: the device addresses of INPUT and OUTPUT. No other work of the device uses them until `run` returns.
    """

    def __init__(
        self,
        links: Executor,
        device: Device,
        stream: Stream,
        memory: MessageMemory,
        call: Call,
        operands: tuple[int, int],
    ) -> None:
        check_plan(call.plan, links.rank, links.size, "messages of a device", ABLE)
        self._links, self._device, self._stream, self._memory = links, device, stream, memory
        self._call, self._operands = call, operands
        self._extent = call.extents[0]
        itemsize = self._extent.dtype.itemsize
        self._layout = Layout(call.plan, call.shape, itemsize, call.segments, lambda of, _: of is Buffer.SCRATCH)
        self._scratch: Allocation | None = None
        self._deadline = Deadline(0.0)

    def run(self, deadline: Deadline) -> None:
        """Run the plan, and block until its result is on the device.

        Raises:
            PeerLostError, MismatchError, CollectiveTimeoutError, AbortedError: the call failed. Then the transport may
                still use the memory.
        """
        self._deadline = deadline
        self._scratch = self._memory.take(self._layout.nbytes) if self._layout.nbytes else None
        try:
            self._until_over([Lane(index, self._call, self._post) for index in range(len(self._call.plan.lanes))])
        except BaseException:
            self._memory.is_torn = True
            raise
        if self._scratch is not None:
            self._memory.give(self._scratch, self._layout.nbytes)

    def _until_over(self, lanes: Sequence[Lane]) -> None:
        for pause_s in pauses_of_polling():
            while any(lane.advance(lanes) for lane in lanes):
                pass
            if all(lane.is_finished() for lane in lanes):
                return
            self._links.check(str(self._call.signature))
            if self._deadline.has_passed():
                peers = sorted({self._links.members[posted.peer] for lane in lanes for posted in lane.posted()})
                raise CollectiveTimeoutError(
                    f"rank {self._links.members[self._links.rank]} waited for rank {peers[0]} on another "
                    f"host until the time limit of {self._call.signature}",
                    peer=peers[0],
                )
            if pause_s is not None:
                time.sleep(pause_s)

    def _post(self, step: Step, lane: int, group: int, segment: int) -> Posted | None:
        request = _Request(_POST[type(step)](self, step, lane, segment))
        return None if request.done() else Posted(getattr(step, "peer", self._links.rank), request)

    # Steps: generators, which yield as long as something is under way.

    def sending(self, step: Send, lane: int, segment: int) -> Iterator[None]:
        operations = [self._sent(step.peer, lane, *piece) for piece in self._pieces(step.src, segment)]
        while not all(operation.poll() for operation, _ in operations):
            yield

    def receiving(self, step: Recv, lane: int, segment: int) -> Iterator[None]:
        yield from self._received(step.peer, lane, self._pieces(step.dst, segment))

    def receiving_to_reduce(self, step: RecvReduce, lane: int, segment: int) -> Iterator[None]:
        own, targets = self._pieces(step.src, segment), self._pieces(step.dst, segment)
        total = sum(nbytes for _, nbytes in own)
        if not total:
            return
        chunk = self._memory.take(total)
        stage, address = [], chunk.pointer
        for _, nbytes in own:
            stage.append((address, nbytes))
            address += nbytes
        yield from self._received(step.peer, lane, stage)
        operands = [stage, own] if step.received_first else [own, stage]
        yield from self._reduced(targets, operands, step.lower)
        self._memory.give(chunk, total)

    def copying(self, step: Copy, lane: int, segment: int) -> Iterator[None]:
        if step.lower:
            yield from self.reducing(Reduce(step.dst, (step.src,), lower=True), lane, segment)
            return
        pairs = list(zip(self._pieces(step.dst, segment), self._pieces(step.src, segment), strict=True))
        for (dst, nbytes), (src, _) in pairs:
            if dst != src:
                self._device.copy(dst, src, nbytes, self._stream)
        yield from self._until_idle()

    def reducing(self, step: Reduce, lane: int, segment: int) -> Iterator[None]:
        sources = [self._pieces(source, segment) for source in step.sources]
        yield from self._reduced(self._pieces(step.dst, segment), sources, step.lower)

    def _reduced(
        self, targets: Sequence[tuple[int, int]], operands: Sequence[Sequence[tuple[int, int]]], lower: bool
    ) -> Iterator[None]:
        dtype, op = self._extent.dtype, self._extent.op
        assert op is not None, "the verifier and the contracts of collectives ensure it"
        op, size = op if lower else replace(op, lower=Lower.IDENTITY), self._links.size
        for (dst, nbytes), *sources in zip(targets, *operands, strict=True):
            addresses = [address for address, _ in sources]
            self._device.reduce(dst, addresses, nbytes // dtype.itemsize, dtype, op, size, self._stream)
        yield from self._until_idle()

    def _until_idle(self) -> Iterator[None]:
        """Yield until the stream has done its work."""
        event = self._device.new_event()
        try:
            self._device.record(event, self._stream)
            while not self._device.done(event):
                yield
        finally:
            self._device.end_event(event)

    # Messages.

    def _sent(self, peer: int, tag: int, address: int, nbytes: int) -> tuple[Any, AnyArray]:
        """Start a message; return its operation and its array."""
        if self._links.sends_from(MemoryType.CUDA, peer, nbytes, self._deadline.remaining_s()):
            array = _at(address, nbytes)
            return self._links.send(array, _BYTE, peer, tag, MemoryType.CUDA), array
        host = self._memory.pinned.array(nbytes)
        self._device.copy(host.ctypes.data, address, nbytes, self._stream)
        self._memory.to_host_nbytes += nbytes
        for _ in self._until_idle():  # at once, because messages of a lane must be sent in order
            time.sleep(0)
        return self._links.send(host, _BYTE, peer, tag), host

    def _received(self, peer: int, tag: int, pieces: Sequence[tuple[int, int]]) -> Iterator[None]:
        receives = []
        for address, nbytes in pieces:
            takes = self._links.receives_into(MemoryType.CUDA, peer, nbytes)
            array = _at(address, nbytes) if takes else self._memory.pinned.array(nbytes)
            memory = MemoryType.CUDA if takes else MemoryType.HOST
            receives.append((address, array, takes, self._links.recv(array, _BYTE, peer, tag, memory)))
        while not all(probe.poll() for *_, probe in receives):
            yield
        kept = []
        for address, array, takes, probe in receives:
            payload = probe.host_copy() if takes else None
            if takes and payload is None:
                continue
            host = array if payload is None else self._memory.pinned.array(len(payload))
            if payload is not None:
                host[:] = np.frombuffer(payload, np.uint8)
            kept.append(host)
            self._device.copy(address, host.ctypes.data, host.nbytes, self._stream)
            self._memory.to_device_nbytes += host.nbytes
        if kept:
            yield from self._until_idle()

    def _pieces(self, span: Span, segment: int) -> list[tuple[int, int]]:
        """Return the address and the bytes of each block of a span in a segment."""
        itemsize = self._extent.dtype.itemsize
        return [(self._address(place), place.elements * itemsize) for place in self._layout.places(span, segment)]

    def _address(self, place: BlockPlace) -> int:
        if place.buffer is Buffer.SCRATCH:
            assert self._scratch is not None, "the layout has counted its bytes"
            return self._scratch.pointer + place.image
        return self._operands[place.buffer] + place.offset


class _Request:
    """A request that runs a generator, one step at each look, and is done when the generator has ended."""

    def __init__(self, progress: Iterator[None]) -> None:
        self._progress = progress
        self._is_done = False

    def done(self) -> bool:
        self._is_done = self._is_done or next(self._progress, self) is self
        return self._is_done


class _Memory:
    """An array of bytes in memory of a device. The host may use only its address."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def _at(address: int, nbytes: int) -> AnyArray:
    return np.asarray(_Memory(address, nbytes))


_POST: dict[type, Callable[[MessageRun, Any, int, int], Iterator[None]]] = {
    Send: MessageRun.sending,
    Recv: MessageRun.receiving,
    RecvReduce: MessageRun.receiving_to_reduce,
    Copy: MessageRun.copying,
    Reduce: MessageRun.reducing,
}
