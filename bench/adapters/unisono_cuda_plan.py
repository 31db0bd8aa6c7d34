"""Unisono by persistent calls on arrays of the first GPU that other ranks read where they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import unisono as un
from unisono.bench.adapters.unisono_cuda import CudaAdapter, CudaMemory
from unisono.bench.gpu_stages.gpu import GpuVector


class RegisteredVectors(CudaMemory):
    """Vectors in arrays of `unisono.empty`, which other ranks can open."""

    def __init__(self) -> None:
        super().__init__()
        self._arrays: dict[str, tuple[int, Any]] = {}  # by role: bytes and array

    def _vector(self, role: str, count: int, dtype: Any) -> GpuVector:
        nbytes = count * dtype.itemsize
        if role not in self._arrays or self._arrays[role][0] < nbytes:
            self._arrays[role] = nbytes, un.empty(nbytes, "uint8", device="cuda")
        return GpuVector(_pointer(self._arrays[role][1]), count, dtype)


def _pointer(array: Any) -> int:
    """Return the address of an array. CuPy's array interface would need the runtime of CUDA."""
    return int(array.data.ptr if hasattr(array, "data") else array.__cuda_array_interface__["data"][0])


class PlanAdapter(CudaAdapter):
    """The world communicator, by persistent calls."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = RegisteredVectors()

    def call(self, collective: str, array: Any, out: Any) -> Callable[[], object]:
        """Return the call to measure, which ends when the device has finished."""
        if collective == "barrier":
            return super().call(collective, array, out)
        plan, synchronize = self._world.plan(collective, array, out=out), self.memory.gpu.synchronize

        def issue_and_wait() -> None:
            plan()
            synchronize()

        return issue_and_wait


connect = PlanAdapter
