"""A GPU for stages: vectors that every library accepts, and times by the device's clock."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from unisono.transports.cuda.device import LEGACY_STREAM, Allocation, Event, Stream
from unisono.transports.cuda.driver_api.cuda_device import CudaDevice
from unisono.transports.cuda.driver_api.errors import Driver

# All work is issued to the default stream of torch and CuPy.
STREAM: Stream = LEGACY_STREAM
# Written before each measurement, which empties the L2 cache and lets the host get ahead of the device.
FLUSH_NBYTES = 256 << 20


# The elements of one window, and the number of windows at places that a seed chooses.
WINDOW, RANDOM_WINDOWS = 1 << 14, 14


def windows(count: int) -> list[slice]:
    """Return the parts of a long array that are compared: its first and last elements, and some between."""
    if count <= WINDOW * (RANDOM_WINDOWS + 2):
        return [slice(0, count)]
    chosen = np.random.default_rng(count).integers(0, count - WINDOW, RANDOM_WINDOWS)
    return [slice(start, start + WINDOW) for start in (0, count - WINDOW, *map(int, chosen))]


@dataclass(frozen=True)
class GpuVector:
    """A flat array on the device, with `__cuda_array_interface__`."""

    pointer: int
    count: int
    dtype: np.dtype[Any]

    def part(self, elements: slice) -> GpuVector:
        """Return consecutive elements of the array, in the same memory."""
        start, stop, _ = elements.indices(self.count)
        return GpuVector(self.pointer + start * self.dtype.itemsize, stop - start, self.dtype)

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes."""
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


class MeasuredGpu:
    """The first GPU of this process, used by one thread."""

    def __init__(self) -> None:
        self.device = CudaDevice()
        self._event: Event = self.device.new_event()
        self._pinned = self.device.pin(16 << 20)

    def empty(self, count: int, dtype: np.dtype[Any]) -> GpuVector:
        """Return a new vector."""
        return GpuVector(self.device.allocate(count * dtype.itemsize).pointer, count, dtype)

    def free(self, vector: GpuVector) -> None:
        """Release the memory of a vector from `empty`."""
        self.device.free(Allocation(vector.pointer, vector.nbytes))

    def fill(self, vector: GpuVector, pattern: Any) -> None:
        """Write the array `pattern` into `vector`, repeatedly if it is shorter, and its begin if it is longer."""
        raw = np.ascontiguousarray(pattern).view(np.uint8)[: vector.nbytes]
        for start in range(0, raw.nbytes, self._pinned.nbytes):
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

    def fetch(self, vector: GpuVector) -> Any:
        """Return the elements of `vector` as a numpy array."""
        nbytes = vector.nbytes
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


class DeviceClock:
    """Measures times by the device's own clock."""

    def __init__(self, gpu: MeasuredGpu, flush_nbytes: int = FLUSH_NBYTES) -> None:
        self._gpu = gpu
        self._driver = driver = Driver()
        self._context = driver("cuDevicePrimaryCtxRetain", 0)
        with self.current():
            self._start, self._stop = driver("cuEventCreate", 0), driver("cuEventCreate", 0)
        self._flush = [gpu.device.allocate(flush_nbytes) for _ in range(2)]
        self._copy_ms: float | None = None

    def milliseconds(self, issue: Callable[[], object], stream: Stream = STREAM, held_ms: float = 0.0) -> float:
        """Return the time that the device takes for the work that `issue` issues to `stream`.

        The L2 cache is emptied before. Copies hold up the stream for about `held_ms`, so that the host gets ahead.
        """
        with self.current():
            for _ in range(1 + math.ceil(held_ms / self._time_of_copy(stream)) if held_ms else 1):
                self._copy(stream)
            self._driver("cuEventRecord", self._start, stream)
            issue()
            return self._elapsed(stream)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current in this thread."""
        self._driver("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._driver("cuCtxPopCurrent")

    def _copy(self, stream: Stream) -> None:
        written, read = self._flush
        self._gpu.device.copy(written.pointer, read.pointer, written.nbytes, stream)

    def _time_of_copy(self, stream: Stream) -> float:
        """Return the milliseconds of one of the copies that hold up a stream."""
        if self._copy_ms is None:
            self._copy(stream)
            self._driver("cuEventRecord", self._start, stream)
            self._copy(stream)
            self._copy_ms = max(self._elapsed(stream), 1e-3)
        return self._copy_ms

    def _elapsed(self, stream: Stream) -> float:
        self._driver("cuEventRecord", self._stop, stream)
        self._driver("cuEventSynchronize", self._stop)
        return float(self._driver("cuEventElapsedTime", self._start, self._stop))
