"""Unisono on arrays of the first GPU, by calls that name `nccl.native`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.bench.adapters.unisono_cuda import CudaAdapter

ALGORITHM = "nccl.native"


class NcclAdapter(CudaAdapter):
    """The world communicator, whose calls NCCL carries out."""

    def call(self, collective: str, array: Any, out: Any) -> Callable[[], object]:
        """Return the call to measure, which ends when the device has finished."""
        if collective == "barrier":
            return super().call(collective, array, out)
        method, synchronize = getattr(self._world, collective), self.memory.gpu.synchronize

        def issue_and_wait() -> None:
            method(array, out=out, algorithm=ALGORITHM)
            synchronize()

        return issue_and_wait


connect = NcclAdapter
