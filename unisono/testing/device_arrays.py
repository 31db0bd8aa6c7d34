"""Arrays on a device double. Their elements arrive late, and are read as the caller's stream sees them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.collectives.arrays.dlpack import typestr
from unisono.errors import TransportUnavailableError
from unisono.foundation.deadlines import Deadline
from unisono.testing.device_double import GpuDouble
from unisono.transports.cuda import devices
from unisono.transports.cuda.device import Device, Stream
from unisono.transports.cuda.executors.staging import await_event

_PATIENCE_S = 30.0


@contextmanager
def device_double(seed: int = 0, **arguments: Any) -> Iterator[GpuDouble]:
    """Replace the GPU of this process by a double in a with-block; see `GpuDouble` for the arguments.

    Raises:
        AssertionError: when the block ends, a rule of devices has been broken, or something was not released.
    """
    gpu = GpuDouble(seed, **arguments)
    with devices.replaced(gpu.device):
        yield gpu
        gc.collect()
        gpu.synchronize()
    assert not gpu.leaks(), gpu.leaks()
    gpu.close()


class DoubleArray:
    """An array of no library on a double, with `__cuda_array_interface__`, used on one stream.

    The stream writes its elements as late work.

    Attributes:
        shape, dtype: as numpy's.
    """

    def __init__(self, gpu: GpuDouble, values: NDArray[Any], stream: Stream, kind: str = "device") -> None:
        flat = np.asarray(values).reshape(-1, order="F" if _is_in_f_order(values) else "C")
        self.shape, self.dtype = values.shape, values.dtype
        self._device = gpu.device()
        self._stream = stream
        self._memory = gpu.memory(flat.nbytes, kind)
        self.__cuda_array_interface__ = {
            "data": (self._memory.pointer if flat.nbytes else 0, False),
            "shape": values.shape,
            "strides": values.strides if _is_in_f_order(values) else None,
            "typestr": typestr(values.dtype),
            "stream": int(stream),
            "version": 3,
        }
        self._staged = self._device.pin(max(1, flat.nbytes))
        self._staged[: flat.nbytes] = flat.view(np.uint8)
        self._device.copy(self._memory.pointer, self._staged.ctypes.data, flat.nbytes, stream)

    def __del__(self) -> None:
        """Release the memory after the work of its stream, which is its only user."""
        with suppress(TransportUnavailableError):  # of a device whose context has ended
            _when_done(self._device, self._stream)
        self._device.free(self._memory)
        self._device.unpin(self._staged)


def read(gpu: GpuDouble, array: Any) -> NDArray[Any]:
    """Return the elements of an array with `__cuda_array_interface__`, as its stream sees them now."""
    interface = array.__cuda_array_interface__
    dtype, stream = np.dtype(array.dtype), Stream(interface["stream"])
    values = np.empty(interface["shape"], dtype)
    strides = interface["strides"] or values.strides
    device = gpu.device()
    if values.nbytes:
        staged = device.pin(values.nbytes)
        device.copy(staged.ctypes.data, interface["data"][0], values.nbytes, stream)
        _when_done(device, stream)
        values[...] = np.ndarray(interface["shape"], dtype, staged.data, strides=strides)
        device.unpin(staged)
    return values


def _when_done(device: Device, stream: Stream) -> None:
    event = device.new_event()
    device.record(event, stream)
    await_event(device, event, Deadline(_PATIENCE_S))
    device.end_event(event)


def _is_in_f_order(values: NDArray[Any]) -> bool:
    return bool(values.flags.f_contiguous and not values.flags.c_contiguous)
