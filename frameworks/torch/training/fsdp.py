"""Collectives for FSDP2 in memory from `unisono.empty`, which the ranks of a host can map and read in place."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

import unisono

# Their names since torch 2.13, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# The reference count of an array that no tensor uses: the list, the loop variable and the argument of `getrefcount`.
_UNUSED = 3


class Memory:
    """An allocator of memory from `unisono.empty`. A block is used again when no tensor uses it any more."""

    def __init__(self) -> None:
        self._arrays: list[NDArray[Any]] = []

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> Any:
        """Return an uninitialised tensor. On another device than the host, torch allocates it."""
        nbytes = math.prod(size) * dtype.itemsize
        if device.type != "cpu" or nbytes == 0:
            return torch.empty(*size, dtype=dtype, device=device)
        for array in self._arrays:
            if array.nbytes == nbytes and sys.getrefcount(array) <= _UNUSED:
                break
        else:
            array = unisono.empty((nbytes,), np.uint8)
            self._arrays.append(array)
        return torch.from_numpy(array).view(dtype).view(*size)


class AllGather(Memory):
    """The all-gather of a fully sharded module: ``module.set_custom_all_gather(AllGather())``."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        """Gather a shard from each rank into the output. The input may be this rank's part of the output."""
        return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class ReduceScatter(Memory):
    """The reduce-scatter of a fully sharded module: ``module.set_custom_reduce_scatter(ReduceScatter())``."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        """Combine the inputs of all ranks. Each rank gets its shard of the result."""
        return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
