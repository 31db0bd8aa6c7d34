"""Messages of arrays of a GPU: where the transport takes them as they lie, and else through pinned memory of the host.

The host starts a message, and a transport knows no streams. So a send waits until the device has done what was issued
before, of which the elements, or their copy on the host, are the last; and so does a receive that writes to the device.
What it has written is there for everything that is issued after its end. What a receive has got on the host is copied
to the device when it is waited for, by the stream that is current then.

Either side chooses by itself: both ways send the same messages.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any
from weakref import finalize

import numpy as np

from unisono.collectives.arrays.operands import Operand
from unisono.collectives.calls.message_handoff import ReceiveOperand, SendOperand
from unisono.collectives.calls.work import Work, Works
from unisono.collectives.device.adapters import DeviceArrays
from unisono.collectives.device.work import keep_late
from unisono.deadlines import Deadline
from unisono.errors import CollectiveTimeoutError
from unisono.transports.contracts.call import AnyArray, MemoryType
from unisono.transports.contracts.executor import Executor, Probe
from unisono.transports.cuda.device import Device, Event
from unisono.transports.cuda.staging import await_event

# How long closing waits for the device.
_FAREWELL_S = 2.0
# By `PointerFacts.kind`; what is not here is staged.
_MEMORY_TYPES = {"device": MemoryType.CUDA, "pooled": MemoryType.CUDA, "managed": MemoryType.CUDA_MANAGED}


class _Pinned:
    """Pinned memory, which is given back when no array is in it any more."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._array = device.pin(max(1, nbytes))
        self.__array_interface__ = self._array.__array_interface__

    def __del__(self) -> None:
        self._device.unpin(self._array)

    @classmethod
    def like(cls, operand: Operand, device: Device) -> AnyArray:
        """Return a new flat array in pinned memory with the dtype and length of an operand."""
        flat: AnyArray = np.asarray(cls(device, operand.flat.nbytes))[: operand.flat.nbytes].view(operand.flat.dtype)
        return flat


class DeviceMessages:
    """The messages of one rank of a communicator whose arrays are on a device.

    Attributes:
        to_host_nbytes, to_device_nbytes: what has been copied through the host so far.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._copying: deque[_Copying] = deque()
        # Also where nobody closes the communicator, memory is not given back while it is in use.
        finalize(self, keep_late, self._copying).atexit = False
        self.to_host_nbytes = self.to_device_nbytes = 0

    def outgoing(self, x: Any, dest: int, limit_s: float) -> SendOperand:
        """Return the message of `x`, as its elements are: where they lie, if they can be sent from there, or a copy.

        Raises:
            UsageError, TransportUnavailableError: as `DeviceArrays.source`.
            CollectiveTimeoutError: the device has not done in time what was issued to it before.
        """
        memory = DeviceArrays()
        operand = memory.source(x)
        where = _memory_type(memory.device, operand)
        if where is None or not self._executor.sends_from(where, dest, operand.flat.nbytes, limit_s):
            return SendOperand(self._fetched(memory, operand, limit_s), MemoryType.HOST)
        _await_streams(memory, limit_s)
        return SendOperand(operand, where)

    def incoming(self, out: Any, source: int | None, limit_s: float) -> ReceiveOperand:
        """Return what receives for `out`: where that lies, if it can be done, and is not in use any more; or by a copy.

        Raises:
            UsageError, TransportUnavailableError: as `DeviceArrays.target`.
            CollectiveTimeoutError: the device has not done in time what was issued to it before.
        """
        memory = DeviceArrays()
        target = memory.target(out)
        where = _memory_type(memory.device, target)
        if where is None or not self._executor.receives_into(where, source, target.flat.nbytes):
            return _Staged(self, memory, target, out)
        _await_streams(memory, limit_s)
        return _Direct(self, memory, target, out, where)

    def store(self, memory: DeviceArrays, target: Operand, host: AnyArray) -> _Copying:
        """Issue the copy of pinned memory to `target` to the caller's stream, and keep both alive until it is done."""
        self.to_device_nbytes += host.nbytes
        storing = _copied(memory, target.flat, host, kept=host)
        self._keep(storing)
        return storing

    def _fetched(self, memory: DeviceArrays, operand: Operand, limit_s: float) -> Operand:
        """Return the elements on the host, when the device has copied them there."""
        flat = _Pinned.like(operand, memory.device)
        fetching = _copied(memory, flat, operand.flat, kept=flat)
        self.to_host_nbytes += flat.nbytes
        try:
            fetching.wait(Deadline(limit_s))
        except CollectiveTimeoutError:
            self._keep(fetching)
            raise
        return Operand(flat, operand.dtype, operand.shape, operand.order)

    def _keep(self, copying: _Copying) -> None:
        """Keep what a copy reads and writes alive until it is done."""
        while self._copying and self._copying[0].is_over():
            self._copying.popleft()
        self._copying.append(copying)

    def close(self) -> None:
        """Wait for the copies, but no longer than seconds."""
        deadline = Deadline(_FAREWELL_S)
        with suppress(CollectiveTimeoutError):
            while self._copying:
                self._copying[0].wait(deadline)
                self._copying.popleft()
        keep_late(self._copying)


class _ToDevice(ReceiveOperand):
    """A message to an array of a device, of whichever memory its executor receives it in.

    Attributes:
        storing: the copy to the array, if one has been issued.
    """

    def __init__(self, messages: DeviceMessages, memory: DeviceArrays, target: Operand, out: Any) -> None:
        super().__init__(target, out)
        self.storing: _Copying | None = None
        self._messages = messages
        self._memory = memory
        self._target = target

    def work(self, works: Works, received: Probe, limit_s: float) -> Work[Any]:
        """See `ReceiveOperand.work`."""
        return works.keep(_ReceiveWork(works, received, limit_s, self))

    def store(self, host: AnyArray) -> None:
        """Issue the copy of pinned memory to the array, to the caller's stream."""
        self.storing = self._messages.store(self._memory, self._target, host)


class _Staged(_ToDevice):
    """A message that is received on the host."""

    def __init__(self, messages: DeviceMessages, memory: DeviceArrays, target: Operand, out: Any) -> None:
        super().__init__(messages, memory, target, out)
        flat = _Pinned.like(target, memory.device)
        self.operand = Operand(flat, target.dtype, target.shape, target.order)

    def finish(self, received: Probe | None) -> Any:
        """Issue the copy of what has been received, and return the array."""
        self.store(self.operand.flat)
        return super().finish(received)


class _Direct(_ToDevice):
    """A message that is received where the array lies."""

    def __init__(
        self, messages: DeviceMessages, memory: DeviceArrays, target: Operand, out: Any, where: MemoryType
    ) -> None:
        super().__init__(messages, memory, target, out)
        self.memory = where

    def finish(self, received: Probe | None) -> Any:
        """Return the array, which has its elements; or issue the copy of those that had to be left on the host."""
        aside = None if received is None else received.aside()
        if aside is not None:
            flat = _Pinned.like(self.operand, self._memory.device)
            flat.view(np.uint8)[:] = np.frombuffer(aside, np.uint8)
            self.store(flat)
        return super().finish(received)


class _ReceiveWork(Work[Any]):
    """A receive for an array of a device."""

    __slots__ = ("_incoming",)

    def __init__(self, works: Works, received: Probe, limit_s: float, incoming: _ToDevice) -> None:
        super().__init__(works, received, None, limit_s, lambda _: incoming.finish(received), received.found)
        self._incoming = incoming

    def synchronize(self, timeout_s: float | None = None) -> Any:
        """Do what `wait` does, and wait until the device has its elements.

        Raises:
            CollectiveTimeoutError: it has not got them in time. Any other error as `wait`.
        """
        deadline = Deadline(self._seconds(timeout_s))
        result = self.wait(timeout_s)
        if self._incoming.storing is not None:
            self._incoming.storing.wait(deadline)
        return result


class _Copying:
    """A copy that has been issued, what it reads and writes, and the event that says that it is done."""

    def __init__(self, device: Device, event: Event, kept: object) -> None:
        self.event = event
        self._device = device
        self._kept = kept

    def __del__(self) -> None:
        self._device.end_event(self.event)

    def is_over(self) -> bool:
        return self._device.done(self.event)

    def wait(self, deadline: Deadline) -> None:
        await_event(self._device, self.event, deadline)


def _copied(memory: DeviceArrays, target: AnyArray, source: AnyArray, kept: AnyArray) -> _Copying:
    """Issue a copy to the caller's stream, of which `kept` is the side that is on the host."""
    device, stream = memory.device, memory.streams()[0]
    if source.nbytes:
        device.copy(target.ctypes.data, source.ctypes.data, source.nbytes, stream)
    copying = _Copying(device, device.new_event(), (memory, kept))
    device.record(copying.event, stream)
    return copying


def _memory_type(device: Device, operand: Operand) -> MemoryType | None:
    """Return where the elements of an array lie; None where no transport takes them, or if there are none."""
    return _MEMORY_TYPES.get(device.facts(operand.flat.ctypes.data).kind) if operand.flat.nbytes else None


def _await_streams(memory: DeviceArrays, limit_s: float) -> None:
    """Block until the device has done what the caller has issued so far to the streams of the arrays."""
    device, deadline = memory.device, Deadline(limit_s)
    event = device.new_event()
    try:
        for stream in memory.streams():
            device.record(event, stream)
            await_event(device, event, deadline)
    finally:
        device.end_event(event)
