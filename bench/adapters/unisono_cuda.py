"""Unisono, through its public interface, on arrays of the first GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.bench.adapters.unisono_api import UnisonoAdapter
from unisono.bench.gpu_stages.gpu import STREAM, GpuVector, MeasuredGpu, windows


class CudaMemory:
    """Vectors of the device. The memory of one call is used again for the next one if it is large enough."""

    def __init__(self) -> None:
        self.gpu = MeasuredGpu()
        self._kept: dict[str, GpuVector] = {}

    def empty(self, count: int, dtype: Any) -> GpuVector:
        """Return a vector to be overwritten."""
        return self._vector("array", count, dtype)

    def place(self, array: Any) -> GpuVector:
        """Return a vector with the content of `array`."""
        vector = self._vector("source", array.size, array.dtype)
        self.gpu.fill(vector, array)
        return vector

    def fill(self, array: GpuVector, source: GpuVector) -> None:
        """Copy `source` into `array`, and wait."""
        self.gpu.device.copy(array.pointer, source.pointer, source.nbytes, STREAM)
        self.gpu.synchronize()

    def fetch(self, array: GpuVector, part: slice) -> Any:
        """Return a part of `array`."""
        return self.gpu.fetch(array.part(part))

    def compared(self, count: int) -> list[slice]:
        """Return the parts that are compared: copies of 1 GiB to the host take seconds."""
        return windows(count)

    def _vector(self, role: str, count: int, dtype: Any) -> GpuVector:
        kept = self._kept.get(role)
        if kept is None or kept.nbytes < count * dtype.itemsize:
            if kept is not None:
                self.gpu.free(kept)
            self._kept[role] = kept = self.gpu.empty(count, dtype)
        return GpuVector(kept.pointer, count, dtype)


class CudaAdapter(UnisonoAdapter):
    """The world communicator on arrays of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = CudaMemory()

    def call(self, collective: str, array: Any, out: Any) -> Callable[[], object]:
        """Return the call to measure, which ends when the device has finished."""
        issue = super().call(collective, array, out)

        def issue_and_wait() -> None:
            issue()
            self.memory.gpu.synchronize()

        return issue_and_wait


connect = CudaAdapter
