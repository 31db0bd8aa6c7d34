"""A GPU array of Unisono's own: the result of a call on an array that supports a protocol but has no known library."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np

from unisono.collectives.arrays.dlpack import ForeignMemory, lend_by_dlpack, packed_strides, typestr
from unisono.errors import UnisonoError
from unisono.transports.cuda.device import LEGACY_STREAM, Allocation, Device, Event, Stream

_CUDA = 2  # DLPack's device type for CUDA memory


class DeviceArray:
    """An array in GPU memory, with `__cuda_array_interface__` and `__dlpack__`.

    ``cupy.asarray``, ``torch.from_dlpack`` and similar functions use it without a copy. Its memory is freed when no
    object refers to it any more, behind the work that uses it.

    Attributes:
        shape, strides, dtype: the same as of a numpy array.
    """

    def __init__(
        self,
        memory: ResultMemory,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: np.dtype[Any],
        stream: Stream,
    ) -> None:
        """Create an array in the first bytes of `memory`, which is used on `stream`, a stream that always exists."""
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self._memory = memory
        self._stream = stream

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: np.dtype[Any], _: Any, device: Device, stream: Stream) -> DeviceArray:
        """Return a new array in C order, as `DeviceAdapter.empty` does."""
        memory = DeviceMemory(device, prod(shape) * dtype.itemsize, stream)
        # The array may live longer than the stream of the program.
        lasting = stream if stream == LEGACY_STREAM else device.lasting_stream()
        return cls(memory, shape, packed_strides(shape, dtype.itemsize), dtype, lasting)

    def __repr__(self) -> str:
        return f"<unisono.DeviceArray {self.dtype}{list(self.shape)} on cuda:{self._memory.device.ordinal}>"

    @property
    def T(self) -> DeviceArray:  # noqa: N802  (numpy's name)
        """The transposed array, in the same memory."""
        return DeviceArray(self._memory, self.shape[::-1], self.strides[::-1], self.dtype, self._stream)

    def memory(self) -> ForeignMemory:
        """Return the address and layout, for work that is ordered with that on `stream`."""
        on = "cuda", self._memory.device.ordinal
        return ForeignMemory(
            self._memory.pointer, self.shape, self.strides, self.dtype, on, read_only=False, stream=None, owner=self
        )

    @property
    def stream(self) -> Stream:
        """The stream on which the array is used."""
        return self._stream

    def note_use(self, stream: Stream) -> None:
        """Note that the library uses the memory in work that `stream` has now, and not after that."""
        self._memory.note_use(stream)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The dictionary of protocol version 3. The elements are complete when the work of the stream is done."""
        self._memory.lend(None)
        return {
            "data": (self._memory.pointer, False),
            "shape": self.shape,
            "strides": self.strides,
            "typestr": typestr(self.dtype),
            "stream": int(self._stream),
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's device type for CUDA, and the number of the device."""
        return _CUDA, self._memory.device.ordinal

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule. The consumer's `stream`, by default the legacy one, waits for the elements.

        With ``stream=-1``, no stream waits. The capsule is of DLPack before 1.0, which every `max_version` allows.

        Raises:
            BufferError: the consumer asks for a copy, or for another device, or DLPack has no type for the elements.
        """
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("the array exports its memory as it is, without a copy and on its device: copy it there")
        if stream == -1:
            self._memory.lend(None)
        else:
            self._memory.order(Stream(stream or LEGACY_STREAM), self._stream)
        return lend_by_dlpack(self, self._memory.pointer, self.__dlpack_device__())


class ResultMemory(Protocol):
    """Device memory of an array; see `DeviceMemory`."""

    @property
    def device(self) -> Device:
        """The device."""

    @property
    def pointer(self) -> int:
        """The address there."""

    def lend(self, stream: Stream | None) -> None:
        """Note that `stream` uses the memory; None for a stream that is not known."""

    def order(self, later: Stream, earlier: Stream) -> None:
        """Make later work of one stream, which uses the memory, wait for the work that the other stream has now."""

    def note_use(self, stream: Stream) -> None:
        """Note that work which `stream` has now uses the memory. A later use is on the same stream."""


class DeviceMemory:
    """Device memory for work on `stream`, freed when no object refers to this one any more.

    It is taken from the pool of the device if that has one. Calls of the library that use it keep this object until the
    device has done them. So at the end, only the program's work may be under way. That on the legacy stream, which
    always exists, is behind an event. Work on any other stream is not known: the stream may have been destroyed. Then
    the memory is freed after all work of the process.

    Attributes:
        device, pointer: the device, and the address there.
    """

    def __init__(self, device: Device, nbytes: int, stream: Stream) -> None:
        is_taken = device.has_pool()
        allocation = device.take(nbytes, stream) if is_taken else device.allocate(max(1, nbytes))
        self.device = device
        self.pointer = allocation.pointer
        self._users = _Users([recorded(device, stream)] if is_taken else [])
        # At exit nothing is freed: the driver releases all memory of the process.
        weakref.finalize(self, _free, device, allocation, self._users).atexit = False

    def lend(self, stream: Stream | None) -> None:
        """Note that the program uses the memory on `stream`; None for a stream that is not known."""
        if stream == LEGACY_STREAM:
            self._users.on_legacy = True
        else:
            self._users.unknown = True

    def order(self, later: Stream, earlier: Stream) -> None:
        """Make later work of one stream, which uses the memory, wait for the work that the other stream has now."""
        self.lend(later)
        order_streams(self.device, later, earlier)

    def note_use(self, stream: Stream) -> None:
        """Free the memory after the work that `stream` has now. A later use is on the same stream."""
        self._users.events.append(recorded(self.device, stream))
        for earlier in self._users.events[1:-1]:
            self.device.end_event(earlier)
        del self._users.events[1:-1]


def recorded(device: Device, stream: Stream) -> Event:
    """Return a new event behind the work that a stream has now."""
    event = device.new_event()
    device.record(event, stream)
    return event


def order_streams(device: Device, later: Stream, earlier: Stream) -> None:
    """Make later work of one stream wait for the work that the other stream has now."""
    if later != earlier:
        event = recorded(device, earlier)
        device.wait(later, event)
        device.end_event(event)


@dataclass(slots=True)
class _Users:
    """The work that uses memory: that before `events`, on the legacy stream, and on streams that are not known."""

    events: list[Event]
    on_legacy: bool = False
    unknown: bool = False


def _free(device: Device, allocation: Allocation, users: _Users) -> None:
    if users.on_legacy and not users.unknown:
        try:
            users.events.append(recorded(device, LEGACY_STREAM))
        except UnisonoError:  # a stream records a graph, or the device takes no new work
            users.unknown = True
    if not users.unknown:
        device.give(allocation, users.events)
        return
    for event in users.events:
        device.end_event(event)
    device.give(allocation, None)
