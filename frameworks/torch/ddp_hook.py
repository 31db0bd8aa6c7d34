"""What goes between torch's own process groups and a communicator of ours."""

# DDP reads the annotations of hooks, which must therefore not be text.

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from unisono import Communicator
from unisono.frameworks.arrays import Array
from unisono.frameworks.gradients.bucket_comms import BucketComms, resolved_teams
from unisono.frameworks.torch.tensors import Stage
from unisono.frameworks.torch.work import Kept, Work


def ddp_hook(communicator: Communicator, compression: str | None = None) -> Callable[[Any, Any], Any]:
    """Return a hook that averages the gradients of DDP over a communicator, whatever the process group.

    ``model.register_comm_hook(None, ddp_hook(world))``, where the ranks of `world` are those of the group, in its
    order. DDP goes on using its process group for parameters and buffers.

    Args:
        communicator: the ranks.
        compression: "float16", "bfloat16" or "int8", in which gradients travel, as with `unisono.GradientReducer`.

    Raises:
        UsageError: there is no such compression.
    """
    kept, residuals = Kept(), _Residuals()
    teams = resolved_teams(None, len(communicator.hosts), 0, compression)
    comms = BucketComms(communicator, teams, "avg", compression, None)
    comms.open()

    def average(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        tensor, stage = bucket.buffer(), Stage()
        x = stage.write(tensor)
        if comms.compresses(x.dtype.name):
            pending = comms.reduction(0, bucket.index(), x, residuals.of(bucket.index(), x.size))()
        else:
            pending = communicator.allreduce(x, "avg", out=x, wait=False)
        work = Work(pending, [tensor], stage.finish, kept)
        return work.get_future().then(lambda future: future.value()[0])

    return average


class _Residuals:
    """What compression has left of each bucket, until DDP makes other buckets."""

    def __init__(self) -> None:
        self._arrays: dict[int, Array] = {}

    def of(self, index: int, elements: int) -> Array:
        if index not in self._arrays or self._arrays[index].size != elements:
            self._arrays[index] = np.zeros(elements, np.float32)
        return self._arrays[index]
