"""A backend of torch.distributed, in the way of its users: collectives on CPU tensors."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

# The environment variable that names the backend.
BACKEND = "BENCH_TORCH_BACKEND"


class TorchAdapter:
    """The default process group of torch.distributed, from the launcher's variables."""

    def __init__(self) -> None:
        self._torch = importlib.import_module("torch")
        self._distributed = importlib.import_module("torch.distributed")
        backend = os.environ[BACKEND]
        self._distributed.init_process_group(backend)
        self.size = self._distributed.get_world_size()
        self.version = f"{backend.capitalize()} of torch {self._torch.__version__}"
        self.barrier = self._distributed.barrier

    def call(self, collective: str, array: Any, out: Any) -> Callable[[], object]:
        """Return the call to measure, on tensors that share the arrays' memory."""
        if collective == "scan":
            raise NotImplementedError("torch.distributed has no scan")
        tensor, result = self._tensor(array), self._tensor(out)
        is_root = self._distributed.get_rank() == 0
        calls: dict[str, Callable[[], object]] = {
            "allreduce": partial(self._distributed.all_reduce, tensor),
            "reduce": partial(self._distributed.reduce, tensor, 0),
            "broadcast": partial(self._distributed.broadcast, tensor, 0),
            "gather": partial(self._distributed.gather, tensor, self._shares(result) if is_root else None),
            "scatter": partial(self._distributed.scatter, result, self._shares(tensor) if is_root else None),
            "allgather": partial(self._distributed.all_gather_single, result, tensor),
            "reduce_scatter": partial(self._distributed.reduce_scatter_single, result, tensor),
            "alltoall": partial(self._distributed.all_to_all_single, result, tensor),
            "barrier": self._distributed.barrier,
        }
        return calls[collective]

    def close(self) -> None:
        """Destroy the process group."""
        self._distributed.destroy_process_group()

    def _shares(self, tensor: Any) -> list[Any]:
        return list(tensor.chunk(self.size))

    def _tensor(self, array: Any) -> Any:
        if array.dtype.name == "bfloat16":  # torch does not take arrays of dtypes that are not numpy's own
            return self._torch.from_numpy(array.view("int16")).view(self._torch.bfloat16)
        return self._torch.from_numpy(array)


connect = TorchAdapter
