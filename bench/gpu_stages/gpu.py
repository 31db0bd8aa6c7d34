"""A GPU for stages: vectors that every library accepts, and times by the device's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from unisono.transports.cuda.device import LEGACY_STREAM, Allocation, Event, Stream
from unisono.transports.cuda.driver import CudaDevice
from unisono.transports.cuda.driver_errors import Driver

# All work is issued to the default stream of torch and CuPy.
STREAM: Stream = LEGACY_STREAM
# Written before each measurement, which empties the L2 cache and lets the host get ahead of the device.
FLUSH_NBYTES = 256 << 20


@dataclass(frozen=True)
class Vector:
    """A flat array on the device, with `__cuda_array_interface__`."""

    pointer: int
    count: int
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.count * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The array in version 3 of the protocol."""
        return {
            "data": (self.pointer, False),
            "shape": (self.count,),
            "typestr": self.dtype.str,
            "stream": int(STREAM),
            "version": 3,
        }


class Gpu:
    """The first GPU of this process, used by one thread."""

    def __init__(self) -> None:
        self.device = CudaDevice()
        self._event: Event = self.device.new_event()
        self._pinned = self.device.pin(16 << 20)

    def empty(self, count: int, dtype: np.dtype[Any]) -> Vector:
        """Return a new vector."""
        return Vector(self.device.allocate(count * dtype.itemsize).pointer, count, dtype)

    def free(self, vector: Vector) -> None:
        """Release the memory of a vector from `empty`."""
        self.device.free(Allocation(vector.pointer, vector.nbytes))

    def fill(self, vector: Vector, pattern: Any) -> None:
        """Write the array `pattern` into `vector`, repeatedly if it is shorter."""
        raw = np.ascontiguousarray(pattern).view(np.uint8)
        for start in range(0, min(raw.nbytes, vector.nbytes), self._pinned.nbytes):
            part = raw[start : start + self._pinned.nbytes]
            self._pinned[: part.nbytes] = part
            self.device.copy(vector.pointer + start, self._pinned.ctypes.data, part.nbytes, STREAM)
            self.synchronize()
        written = raw.nbytes
        while written < vector.nbytes:
            length = min(written, vector.nbytes - written)
            self.device.copy(vector.pointer + written, vector.pointer, length, STREAM)
            written += length
        self.synchronize()

    def fetch(self, vector: Vector, count: int | None = None) -> Any:
        """Return the first elements of `vector`, or all, as a numpy array."""
        nbytes = vector.nbytes if count is None else min(count, vector.count) * vector.dtype.itemsize
        data = np.empty(nbytes, np.uint8)
        for start in range(0, nbytes, self._pinned.nbytes):
            length = min(self._pinned.nbytes, nbytes - start)
            self.device.copy(self._pinned.ctypes.data, vector.pointer + start, length, STREAM)
            self.synchronize()
            data[start : start + length] = self._pinned[:length]
        return data.view(vector.dtype)

    def synchronize(self) -> None:
        """Wait until all issued work is done."""
        self.device.record(self._event, STREAM)
        while not self.device.done(self._event):
            time.sleep(0)


class Clock:
    """Measures times by the device's own clock."""

    def __init__(self, gpu: Gpu, flush_nbytes: int = FLUSH_NBYTES) -> None:
        self._gpu = gpu
        self._driver = driver = Driver()
        driver("cuCtxPushCurrent", driver("cuDevicePrimaryCtxRetain", 0))
        self._start, self._stop = driver("cuEventCreate", 0), driver("cuEventCreate", 0)
        self._flush = [gpu.device.allocate(flush_nbytes) for _ in range(2)]

    def milliseconds(self, issue: Callable[[], object]) -> float:
        """Return the time that the device takes for the work that `issue` issues to `STREAM`."""
        written, read = self._flush
        self._gpu.device.copy(written.pointer, read.pointer, written.nbytes, STREAM)
        self._driver("cuEventRecord", self._start, STREAM)
        issue()
        self._driver("cuEventRecord", self._stop, STREAM)
        self._driver("cuEventSynchronize", self._stop)
        return float(self._driver("cuEventElapsedTime", self._start, self._stop))
