"""Messages of arrays of a GPU, which go through pinned memory of the host.

A send waits until its elements are on the host, for nobody else would start it then. What a receive has got is copied
to the device when it is waited for, by the stream that is current then.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np

from unisono.collectives.arrays import Operand
from unisono.collectives.device_arrays import DeviceArrays
from unisono.errors import CollectiveTimeoutError
from unisono.transports.base import AnyArray
from unisono.transports.cuda.device import Device, Event
from unisono.transports.cuda.staging import await_event

# How long closing waits for the device.
_FAREWELL_S = 2.0


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
    """The messages of one rank of a communicator whose arrays are on a device."""

    def __init__(self) -> None:
        self._storing: deque[_Storing] = deque()

    def fetched(self, x: Any, limit_s: float) -> Operand:
        """Return the elements of `x` on the host, when they are there.

        Raises:
            UsageError, TransportUnavailableError: as `DeviceArrays.source`.
            CollectiveTimeoutError: the device has not done in time what was issued to it before.
        """
        memory = DeviceArrays()
        operand = memory.source(x)
        device, flat = memory.device, _Pinned.like(operand, memory.device)
        event = device.new_event()
        stream = memory.streams()[0]
        if flat.nbytes:
            device.copy(flat.ctypes.data, operand.flat.ctypes.data, flat.nbytes, stream)
        device.record(event, stream)
        try:
            await_event(device, event, time.monotonic() + limit_s)
        finally:
            device.end_event(event)
        return Operand(flat, operand.dtype, operand.shape, operand.order)

    def incoming(self, out: Any) -> Incoming:
        """Return what receives for `out`; raises as `DeviceArrays.target`."""
        return Incoming(out, self)

    def keep(self, storing: _Storing) -> None:
        """Keep the arrays of a copy to the device alive until it is done."""
        while self._storing and self._storing[0].is_over():
            self._storing.popleft()
        self._storing.append(storing)

    def close(self) -> None:
        """Wait for the copies to the device, but no longer than seconds; what is late then is kept for ever."""
        deadline = time.monotonic() + _FAREWELL_S
        with suppress(CollectiveTimeoutError):
            while self._storing:
                self._storing[0].wait(deadline)
                self._storing.popleft()


class Incoming:
    """A message on its way to an array of a device.

    Attributes:
        operand: where it is received, on the host.
    """

    def __init__(self, out: Any, messages: DeviceMessages) -> None:
        self._out = out
        self._messages = messages
        self._memory = DeviceArrays()
        self._target = self._memory.target(out)
        flat = _Pinned.like(self._target, self._memory.device)
        self.operand = Operand(flat, self._target.dtype, self._target.shape, self._target.order)

    def store(self) -> Any:
        """Issue the copy of what has been received to the caller's stream, and return the array."""
        device, stream, flat = self._memory.device, self._memory.streams()[0], self.operand.flat
        if flat.nbytes:
            device.copy(self._target.flat.ctypes.data, flat.ctypes.data, flat.nbytes, stream)
        storing = _Storing(device, device.new_event(), self)
        device.record(storing.event, stream)
        self._messages.keep(storing)
        return self._out


class _Storing:
    """A copy to the device that has been issued, what it reads and writes, and the event that says that it is done."""

    def __init__(self, device: Device, event: Event, incoming: Incoming) -> None:
        self.event = event
        self._device = device
        self._incoming = incoming

    def __del__(self) -> None:
        self._device.end_event(self.event)

    def is_over(self) -> bool:
        return self._device.done(self.event)

    def wait(self, deadline: float) -> None:
        await_event(self._device, self.event, deadline)
