"""A GPU array of Unisono's own: the result of a call on an array that supports a protocol but has no known library."""

from __future__ import annotations

import weakref
from math import prod
from typing import Any

import numpy as np

from unisono.collectives.arrays.dlpack import lend_by_dlpack, packed_strides, typestr
from unisono.transports.cuda.device import LEGACY_STREAM, Device, Stream

_CUDA = 2  # DLPack's device type for CUDA memory


class DeviceArray:
    """An array in GPU memory, with `__cuda_array_interface__` and `__dlpack__`.

    ``cupy.asarray``, ``torch.from_dlpack`` and similar functions use it without a copy. Its memory is freed when no
    object refers to it any more.

    Attributes:
        shape, strides, dtype: the same as of a numpy array.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: np.dtype[Any],
        stream: Stream,
    ) -> None:
        """Create an array in the first bytes of `memory`, which is used on `stream`."""
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self._memory = memory
        self._stream = stream

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: np.dtype[Any], _: Any, device: Device, stream: Stream) -> DeviceArray:
        """Return a new array in C order, as `DeviceAdapter.empty` does."""
        memory = DeviceMemory(device, prod(shape) * dtype.itemsize)
        return cls(memory, shape, packed_strides(shape, dtype.itemsize), dtype, stream)

    def __repr__(self) -> str:
        return f"<unisono.DeviceArray {self.dtype}{list(self.shape)} on cuda:{self._memory.device.ordinal}>"

    @property
    def T(self) -> DeviceArray:  # noqa: N802  (numpy's name)
        """The transposed array, in the same memory."""
        return DeviceArray(self._memory, self.shape[::-1], self.strides[::-1], self.dtype, self._stream)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The dictionary of protocol version 3. The elements are complete when the work of the stream is done."""
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

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        """Return a DLPack capsule. The consumer's `stream`, by default the legacy one, waits for the elements.

        With ``stream=-1``, no stream waits.
        """
        if stream != -1:
            self._memory.order(Stream(stream or LEGACY_STREAM), self._stream)
        return lend_by_dlpack(self, self._memory.pointer, self.__dlpack_device__())


class DeviceMemory:
    """Device memory that is freed when no object refers to this one any more.

    Attributes:
        device, pointer: the device, and the address there.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        allocation = device.allocate(max(1, nbytes))
        self.device = device
        self.pointer = allocation.pointer
        # At exit nothing is freed: the driver releases all memory of the process.
        weakref.finalize(self, device.free, allocation).atexit = False

    def order(self, later: Stream, earlier: Stream) -> None:
        """Make later work of one stream wait for the work that the other stream has now."""
        if later != earlier:
            event = self.device.new_event()
            self.device.record(event, earlier)
            self.device.wait(later, event)
            self.device.end_event(event)
