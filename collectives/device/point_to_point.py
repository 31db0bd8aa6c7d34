"""Messages of GPU arrays: sent from the array itself if the transport can, and otherwise through pinned host memory.

Used by: `gateway`. Not imported before the first message of a GPU array.

Theory of operation
-------------------
The host starts a message, because a transport knows no streams. So before a send, the host waits until the device has
done all earlier work of the caller; the elements, or their copy on the host, are complete then. Before a receive that
writes to the device, it waits in the same way, because earlier work may still use the memory.

A receive that writes to the device needs no further order: the elements are there when it has ended. A receive into
host memory ends with a copy to the device. `Work.wait` issues this copy to the stream that is current then.

Each side chooses its own way, because the messages are the same. An array in Fortran order is staged on both sides,
because messages hold elements in C order, and the host changes the order.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any
from weakref import finalize

import numpy as np

from unisono.collectives.arrays import operands
from unisono.collectives.arrays.operands import Operand
from unisono.collectives.calls.message_handoff import ReceiveOperand, SendOperand
from unisono.collectives.calls.work import Work, Works
from unisono.collectives.device.adapters import DeviceArrays
from unisono.collectives.device.work import keep_late
from unisono.errors import CollectiveTimeoutError, UnisonoError
from unisono.foundation.deadlines import Deadline
from unisono.transports.contracts.call import AnyArray, MemoryType
from unisono.transports.contracts.executor import Executor, Probe
from unisono.transports.cuda.device import Device, Event, is_over
from unisono.transports.cuda.executors.staging import await_event
from unisono.transports.cuda.memory.pinned_pool import PinnedPool

# How long `close` waits for the device.
_FAREWELL_S = 2.0
# By `PointerFacts.kind`. Messages of other memory are staged.
_MEMORY_TYPES = {"device": MemoryType.CUDA, "pooled": MemoryType.CUDA, "managed": MemoryType.CUDA_MANAGED}


class DeviceMessages:
    """The messages of GPU arrays of one rank of a communicator.

    Attributes:
        to_host_nbytes, to_device_nbytes: the bytes copied to the host, and from the host, so far.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._copying: deque[_Copying] = deque()
        self._pools: dict[Device, PinnedPool] = {}
        # If the program never closes the communicator, memory that a copy uses must not be released either.
        finalize(self, keep_late, self._copying).atexit = False
        self.to_host_nbytes = self.to_device_nbytes = 0

    def outgoing(self, x: Any, dest: int, limit_s: float) -> SendOperand:
        """Return the operand to send `x`: the array itself if the transport sends from its memory, or a copy.

        Raises:
            UsageError, TransportUnavailableError: as `DeviceArrays.source`.
            CollectiveTimeoutError: the device has not done the earlier work in time.
        """
        memory = DeviceArrays()
        operand = memory.source(x)
        memory_type = _memory_type(memory.device, operand)
        if (
            memory_type is None
            or operand.order == "F"
            or not self._executor.sends_from(memory_type, dest, operand.flat.nbytes, limit_s)
        ):
            return SendOperand(self._host_copy(memory, operand, limit_s), MemoryType.HOST)
        _await_streams(memory, limit_s)
        return SendOperand(operand, memory_type)

    def incoming(self, out: Any, source: int | None, limit_s: float) -> ReceiveOperand:
        """Return the operand to receive `out`: the array itself if the transport writes its memory, or a host copy.

        Raises:
            UsageError, TransportUnavailableError: as `DeviceArrays.target`.
            CollectiveTimeoutError: the device has not done the earlier work in time.
        """
        memory = DeviceArrays()
        target = memory.target(out)
        memory_type = _memory_type(memory.device, target)
        if (
            memory_type is None
            or target.order == "F"
            or not self._executor.receives_into(memory_type, source, target.flat.nbytes)
        ):
            return _StagedReceive(self, memory, target, out)
        _await_streams(memory, limit_s)
        return _DirectReceive(self, memory, target, out, memory_type)

    def staged(self, out: Any) -> ReceiveOperand:
        """Return the operand to receive `out` from memory of the host; raises as `incoming`."""
        memory = DeviceArrays()
        return _StagedReceive(self, memory, memory.target(out), out)

    def store(self, memory: DeviceArrays, target: Operand, host: AnyArray) -> _Copying:
        """Issue a copy from pinned memory to `target`, on the caller's stream; keep both alive until it is done."""
        self.to_device_nbytes += host.nbytes
        copying = _copied(memory, target.flat, host, kept=host)
        self._keep(copying)
        return copying

    def pinned(self, operand: Operand, device: Device) -> AnyArray:
        """Return a flat array in pinned memory, with the dtype and length of an operand."""
        pool = self._pools.get(device) or self._pools.setdefault(device, PinnedPool(device))
        return pool.array(operand.flat.nbytes).view(operand.flat.dtype)

    def _host_copy(self, memory: DeviceArrays, operand: Operand, limit_s: float) -> Operand:
        """Return a copy of the elements on the host, in C order; waits until the device has made it."""
        flat = self.pinned(operand, memory.device)
        copying = _copied(memory, flat, operand.flat, kept=flat)
        self.to_host_nbytes += flat.nbytes
        try:
            copying.wait(Deadline(limit_s))
        except CollectiveTimeoutError:
            self._keep(copying)
            raise
        if operand.order == "F":
            flat = flat.reshape(operand.shape, order="F").reshape(-1)
        return operands.in_c_order(operand, flat)

    def _keep(self, copying: _Copying) -> None:
        """Keep the memory that a copy reads and writes alive until it is done."""
        while self._copying and self._copying[0].is_over():
            self._copying.popleft()
        self._copying.append(copying)

    def close(self) -> None:
        """Wait up to 2 s for the copies; keep the memory of those that the device has not done by then."""
        deadline = Deadline(_FAREWELL_S)
        with suppress(UnisonoError):
            while self._copying:
                self._copying[0].wait(deadline)
                self._copying.popleft()
        keep_late(self._copying)
        for pool in self._pools.values():
            pool.close()


class _DeviceReceive(ReceiveOperand):
    """A message to a GPU array.

    Attributes:
        copying: the copy from the host to the array, if one has been issued.
    """

    def __init__(self, messages: DeviceMessages, memory: DeviceArrays, target: Operand, out: Any) -> None:
        super().__init__(target, out)
        self.copying: _Copying | None = None
        self._messages = messages
        self._memory = memory
        self._target = target

    def work(self, works: Works, received: Probe, limit_s: float) -> Work[Any]:
        return works.keep(_ReceiveWork(works, received, limit_s, self))

    def store(self, host: AnyArray) -> None:
        """Issue the copy from pinned memory to the array, on the caller's stream."""
        self.copying = self._messages.store(self._memory, self._target, host)


class _StagedReceive(_DeviceReceive):
    """A message that is received in pinned host memory."""

    def __init__(self, messages: DeviceMessages, memory: DeviceArrays, target: Operand, out: Any) -> None:
        super().__init__(messages, memory, target, out)
        self.operand = operands.in_c_order(target, messages.pinned(target, memory.device))

    def finish(self, received: Probe | None) -> Any:
        """Issue the copy of the received elements to the device, and return the array."""
        flat = self.operand.flat
        if self._target.order == "F":
            flat = self._messages.pinned(self._target, self._memory.device)
            flat[...] = operands.in_fortran_order(self.operand.flat, self._target.shape)
        self.store(flat)
        return super().finish(received)


class _DirectReceive(_DeviceReceive):
    """A message that the transport puts into the array on the device, without pinned memory between."""

    def __init__(
        self, messages: DeviceMessages, memory: DeviceArrays, target: Operand, out: Any, memory_type: MemoryType
    ) -> None:
        super().__init__(messages, memory, target, out)
        self.memory = memory_type

    def finish(self, received: Probe | None) -> Any:
        """Return the array. If the transport had to put the message on the host, issue its copy to the device."""
        host_copy = None if received is None else received.host_copy()
        if host_copy is not None:
            flat = self._messages.pinned(self.operand, self._memory.device)
            flat.view(np.uint8)[:] = np.frombuffer(host_copy, np.uint8)
            self.store(flat)
        return super().finish(received)


class _ReceiveWork(Work[Any]):
    """The work of a receive for a GPU array."""

    __slots__ = ("_incoming",)

    def __init__(self, works: Works, received: Probe, limit_s: float, incoming: _DeviceReceive) -> None:
        super().__init__(works, received, None, limit_s, lambda _: incoming.finish(received), received.message)
        self._incoming = incoming

    def synchronize(self, timeout_s: float | None = None) -> Any:
        """Do the same as `wait`, and then wait until the elements are on the device.

        Raises:
            CollectiveTimeoutError: the device has not copied them in time. Other errors are those of `wait`.
        """
        deadline = Deadline(self._seconds(timeout_s))
        result = self.wait(timeout_s)
        if self._incoming.copying is not None:
            self._incoming.copying.wait(deadline)
        return result


class _Copying:
    """A copy that has been issued, the memory that it uses, and the event behind it."""

    def __init__(self, device: Device, event: Event, kept: object) -> None:
        self.event = event
        self._device = device
        self._kept = kept

    def __del__(self) -> None:
        self._device.end_event(self.event)

    def is_over(self) -> bool:
        return is_over(self._device, self.event)

    def wait(self, deadline: Deadline) -> None:
        await_event(self._device, self.event, deadline)


def _copied(memory: DeviceArrays, target: AnyArray, source: AnyArray, kept: AnyArray) -> _Copying:
    """Issue a copy on the caller's stream; `kept` is the side that is on the host."""
    device, stream = memory.device, memory.streams()[0]
    if source.nbytes:
        device.copy(target.ctypes.data, source.ctypes.data, source.nbytes, stream)
    copying = _Copying(device, device.new_event(), (memory, kept))
    device.record(copying.event, stream)
    return copying


def _memory_type(device: Device, operand: Operand) -> MemoryType | None:
    """Return the type of an array's memory; None if no transport supports it, or if the array is empty."""
    return _MEMORY_TYPES.get(device.facts(operand.flat.ctypes.data).kind) if operand.flat.nbytes else None


def _await_streams(memory: DeviceArrays, limit_s: float) -> None:
    """Block until the device has done all work that the streams of the arrays have now."""
    device, deadline = memory.device, Deadline(limit_s)
    event = device.new_event()
    try:
        for stream in memory.streams():
            device.record(event, stream)
            await_event(device, event, deadline)
    finally:
        device.end_event(event)
