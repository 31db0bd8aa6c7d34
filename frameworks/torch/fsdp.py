"""What FSDP2 gathers parameters and scatters gradients by, in memory that the ranks of a host read where it lies."""

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

# The references to an array of which no tensor is left: of the list, of the loop, and of the question.
_UNUSED = 3


class Memory:
    """Memory from `unisono.empty`, which is used again when no tensor in it is left."""

    def __init__(self) -> None:
        self._arrays: list[NDArray[Any]] = []

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> Any:
        """Return a tensor of any contents; one on another device than the host is torch's own."""
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
    """For ``module.set_custom_all_gather(AllGather())`` of a module that is fully sharded."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        """Gather a shard from each rank into the output, of which the input may be this rank's part."""
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class ReduceScatter(Memory):
    """For ``module.set_custom_reduce_scatter(ReduceScatter())`` of a module that is fully sharded."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        """Combine the inputs of all ranks; each gets its shard of the result."""
        return dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
