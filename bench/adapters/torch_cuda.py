"""Allreduces of torch on CUDA tensors, for ranks that share the first GPU: by backends, and by symmetric memory."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from unisono.bench.gpu_stages import nccl
from unisono.bench.gpu_stages.gpu import windows

# Environment variables: the way, and the largest number of bytes for which it is fast enough to be measured.
WAY = "BENCH_TORCH_WAY"
MOST = "BENCH_MOST_NBYTES"


class TorchMemory:
    """CUDA tensors. Tensors that the library writes are in symmetric memory if the way needs that."""

    def __init__(self, torch: Any, symmetric: Any) -> None:
        self._torch, self._symmetric = torch, symmetric

    def empty(self, count: int, dtype: Any) -> Any:
        """Return a tensor to be overwritten; for symmetric memory, all ranks must call this."""
        create = self._torch.empty if self._symmetric is None else self._symmetric.empty
        tensor = create(count, dtype=getattr(self._torch, dtype.name), device="cuda:0")
        if self._symmetric is not None:
            self._symmetric.rendezvous(tensor, self._torch.distributed.group.WORLD)
        return tensor

    def place(self, array: Any) -> Any:
        """Return a tensor with the content of `array`."""
        return self._torch.from_numpy(array).to("cuda:0")

    def fill(self, array: Any, source: Any) -> None:
        """Copy `source` into `array`, and wait."""
        array.copy_(source)
        self._torch.cuda.synchronize()

    def fetch(self, array: Any, part: slice) -> Any:
        """Return a part of `array`."""
        return array[part].cpu().numpy()

    def compared(self, count: int) -> list[slice]:
        """Return the parts that are compared: copies of 1 GiB to the host take seconds."""
        return windows(count)


class TorchCudaAdapter:
    """One allreduce of torch: by the backend "gloo" or "nccl", or "one_shot" or "two_shot" over symmetric memory."""

    def __init__(self) -> None:
        self._torch = torch = importlib.import_module("torch")
        self._distributed = importlib.import_module("torch.distributed")
        self._way = os.environ[WAY]
        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU")
        torch.cuda.set_device(0)
        self.version = f"{self._way} of torch {torch.__version__}"
        # torch.cuda.nccl.version() would be the version that torch was compiled with.
        if self._way == "nccl" and (refusal := nccl.refusal()) is not None:
            raise RuntimeError(refusal)
        symmetric = self._way.endswith("_shot")
        self._distributed.init_process_group("nccl" if self._way == "nccl" else "gloo")
        self.size = self._distributed.get_world_size()
        module = importlib.import_module("torch.distributed._symmetric_memory") if symmetric else None
        self.memory = TorchMemory(torch, module)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self._distributed.barrier()

    def call(self, collective: str, array: Any, out: Any) -> Callable[[], object]:
        """Return the call to measure, which ends when the device has finished."""
        most = int(os.environ.get(MOST, sys.maxsize))
        if collective != "allreduce" or array.nbytes > most:
            raise NotImplementedError(f"{collective} of {array.nbytes} bytes is not measured")
        group = self._distributed.group.WORLD.group_name
        operations: Any = self._torch.ops.symm_mem
        ways: dict[str, Callable[[], object]] = {
            "one_shot": lambda: out.copy_(operations.one_shot_all_reduce(array, "sum", group)),
            "two_shot": lambda: operations.two_shot_all_reduce_(array, "sum", group),
        }
        issue: Any = ways.get(self._way, partial(self._distributed.all_reduce, array))

        def issue_and_wait() -> None:
            issue()
            self._torch.cuda.synchronize()

        return issue_and_wait

    def close(self) -> None:
        """Destroy the process group."""
        self._distributed.destroy_process_group()


connect = TorchCudaAdapter
