"""An array on a GPU that belongs to no library: the result of a call on one that only keeps to a protocol."""

from __future__ import annotations

import weakref
from math import prod
from typing import Any

import numpy as np

from unisono.collectives.arrays.dlpack import lend_by_dlpack, packed_strides, typestr
from unisono.transports.cuda.device import LEGACY_STREAM, Device, Stream

_CUDA = 2  # DLPack's number of it


class DeviceArray:
    """An array in memory of a GPU, with `__cuda_array_interface__` and `__dlpack__`.

    ``cupy.asarray``, ``torch.from_dlpack`` and their like take it without a copy. Its memory is freed when nothing
    holds it any more.

    Attributes:
        shape, strides, dtype: as numpy's.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: np.dtype[Any],
        stream: Stream,
    ) -> None:
        """Make an array of the first bytes of `memory`, which is used on `stream`."""
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self._memory = memory
        self._stream = stream

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: np.dtype[Any], _: Any, device: Device, stream: Stream) -> DeviceArray:
        """Return a new array in C order; see `DeviceAdapter.empty`."""
        memory = DeviceMemory(device, prod(shape) * dtype.itemsize)
        return cls(memory, shape, packed_strides(shape, dtype.itemsize), dtype, stream)

    def __repr__(self) -> str:
        return f"<unisono.DeviceArray {self.dtype}{list(self.shape)} on cuda:{self._memory.device.ordinal}>"

    @property
    def T(self) -> DeviceArray:  # noqa: N802  (as numpy has it)
        """The array with its axes in reverse, in the same memory."""
        return DeviceArray(self._memory, self.shape[::-1], self.strides[::-1], self.dtype, self._stream)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The array by version 3 of the protocol; its elements are there when the work of its stream is done."""
        return {
            "data": (self._memory.pointer, False),
            "shape": self.shape,
            "strides": self.strides,
            "typestr": typestr(self.dtype),
            "stream": int(self._stream),
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's number of CUDA, and that of the device."""
        return _CUDA, self._memory.device.ordinal

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        """Return a capsule of DLPack. The consumer's `stream`, by default the legacy one, waits for the elements.

        With -1, nothing waits for them.
        """
        if stream != -1:
            self._memory.order(Stream(stream or LEGACY_STREAM), self._stream)
        return lend_by_dlpack(self, self._memory.pointer, self.__dlpack_device__())


class DeviceMemory:
    """Memory of a device that is freed when nothing holds this any more.

    Attributes:
        device, pointer: where it is.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        allocation = device.allocate(max(1, nbytes))
        self.device = device
        self.pointer = allocation.pointer
        # At the end of the process, its memory goes with it.
        weakref.finalize(self, device.free, allocation).atexit = False

    def order(self, later: Stream, earlier: Stream) -> None:
        """Let what is issued to one stream from now on wait for what has been issued to the other."""
        if later != earlier:
            event = self.device.new_event()
            self.device.record(event, earlier)
            self.device.wait(later, event)
            self.device.end_event(event)
