"""What goes between torch's own process groups and a communicator of ours."""

# DDP reads the annotations of hooks, which must therefore not be text.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from unisono import Communicator
from unisono.frameworks.torch.tensors import Stage
from unisono.frameworks.torch.work import Kept, Work


def ddp_hook(communicator: Communicator) -> Callable[[Any, Any], Any]:
    """Return a hook that averages the gradients of DDP over a communicator, whatever the process group.

    ``model.register_comm_hook(None, ddp_hook(world))``, where the ranks of `world` are those of the group, in its
    order. DDP goes on using its process group for parameters and buffers.
    """
    kept = Kept()

    def average(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        tensor, stage = bucket.buffer(), Stage()
        x = stage.write(tensor)
        work = Work(communicator.allreduce(x, "avg", out=x, wait=False), [tensor], stage.finish, kept)
        return work.get_future().then(lambda future: future.value()[0])

    return average
