"""`ddp_hook`: a communication hook by which DDP averages gradients over a communicator of Unisono."""

# No ``from __future__ import annotations``: DDP reads the annotations of a hook, and they must not be strings.

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from unisono import Communicator
from unisono.frameworks.arrays import Array
from unisono.frameworks.gradients.bucket_comms import BucketComms, DeviceAverages, resolved_teams
from unisono.frameworks.torch.tensors import GpuStage, Stage
from unisono.frameworks.torch.work import Work, WorkKeeper


def ddp_hook(communicator: Communicator, compression: str | None = None) -> Callable[[Any, Any], Any]:
    """Return a hook that averages the gradients of DDP over a communicator, whatever the process group.

    Call ``model.register_comm_hook(None, ddp_hook(world))``. The ranks of `world` must be those of the process group,
    in the same order. DDP still uses its process group for parameters and buffers.

    Args:
        communicator: the ranks.
        compression: the type in which gradients travel, as for `unisono.GradientReducer`: "float16", "bfloat16" or
            "int8"; None for no compression.

    Raises:
        UsageError: there is no such compression.
    """
    keeper, residuals = WorkKeeper(), _Residuals()
    teams = resolved_teams(None, len(communicator.hosts), 0, compression)
    comms = BucketComms(communicator, teams, "avg", compression, None)
    comms.open()
    on_device = DeviceAverages(communicator, compression) if compression is not None else None

    def average(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        tensor = bucket.buffer()
        is_compressed = comms.compresses(str(tensor.dtype).removeprefix("torch."))
        if is_compressed and on_device is not None and tensor.is_cuda:
            started = on_device.start(tensor, bucket.index())
            if started is not None:
                work = Work(started[0], [tensor], started[1], keeper)
                return work.get_future().then(lambda future: future.value()[0])
        stage = Stage() if is_compressed else GpuStage()  # the host compresses what a GPU cannot
        x = stage.write(tensor)
        if is_compressed:
            pending = comms.reduction(0, bucket.index(), x, residuals.of(bucket.index(), x.size))()
        else:
            pending = communicator.allreduce(x, "avg", out=x, wait=False)
        work = Work(pending, [tensor], stage.finish, keeper)
        return work.get_future().then(lambda future: future.value()[0])

    return average


class _Residuals:
    """The residual of each bucket of DDP. It starts again from zero when DDP changes its buckets."""

    def __init__(self) -> None:
        self._arrays: dict[int, Array] = {}

    def of(self, index: int, elements: int) -> Array:
        if index not in self._arrays or self._arrays[index].size != elements:
            self._arrays[index] = np.zeros(elements, np.float32)
        return self._arrays[index]
