"""MPI on arrays of the first GPU through pinned memory, as in programs that cannot rely on CUDA-aware MPI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.bench.adapters.mpi import MpiAdapter
from unisono.bench.adapters.unisono_cuda import CudaMemory
from unisono.bench.gpu_stages.gpu import STREAM


class MpiCudaAdapter(MpiAdapter):
    """The world communicator of mpi4py."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = CudaMemory()

    def call(self, collective: str, array: Any, out: Any) -> Callable[[], object]:
        """Return the call to measure: a copy to the host, MPI, and a copy back."""
        gpu = self.memory.gpu
        pinned = gpu.device.pin(array.nbytes)
        staged = pinned.view(array.dtype)
        call = super().call(collective, staged, staged)

        def stage_and_wait() -> None:
            gpu.device.copy(pinned.ctypes.data, array.pointer, array.nbytes, STREAM)
            gpu.synchronize()
            call()
            gpu.device.copy(out.pointer, pinned.ctypes.data, out.nbytes, STREAM)
            gpu.synchronize()

        return stage_and_wait


connect = MpiCudaAdapter
