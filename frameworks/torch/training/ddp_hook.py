"""`ddp_hook`: a communication hook by which DDP averages gradients over a communicator of Unisono."""

# No ``from __future__ import annotations``: DDP reads the annotations of a hook, and they must not be strings.

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from unisono import Communicator
from unisono.frameworks.arrays import Array
from unisono.frameworks.gradients.bucket_comms import BucketComms, DeviceAverages, resolved_teams
from unisono.frameworks.gradients.compression import compression_of
from unisono.frameworks.gradients.layout import Piece, columns_of
from unisono.frameworks.torch.calls.tensors import CallTensors, GpuStage
from unisono.frameworks.torch.calls.work import Work, WorkKeeper


def ddp_hook(communicator: Communicator, compression: str | None = None) -> Callable[[Any, Any], Any]:
    """Return a hook that averages the gradients of DDP over a communicator, whatever the process group.

    Call ``model.register_comm_hook(None, ddp_hook(world))``. The ranks of `world` must be those of the process group,
    in the same order. DDP still uses its process group for parameters and buffers.

    Args:
        communicator: the ranks.
        compression: the form in which gradients travel, as for `unisono.GradientReducer`; None for no compression.

    Raises:
        UsageError: there is no such compression.
    """
    keeper = WorkKeeper()
    teams = resolved_teams(None, len(communicator.hosts), 0, compression)
    comms = BucketComms(communicator, teams, "avg", compression, None)
    comms.open()
    states = _States(comms.kinds_of_state)
    compresses_on_device = compression is not None and compression_of(compression).on_device
    on_device = DeviceAverages(communicator, compression) if compression and compresses_on_device else None

    def average(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        tensor = bucket.buffer()
        is_compressed = comms.compresses(str(tensor.dtype).removeprefix("torch."))
        if is_compressed and on_device is not None and tensor.is_cuda:
            started = on_device.start(tensor, bucket.index())
            if started is not None:
                work = Work(started[0], [tensor], started[1], keeper)
                return work.get_future().then(lambda future: future.value()[0])
        stage = CallTensors() if is_compressed else GpuStage()  # the host compresses what a GPU cannot
        x = stage.write(tensor)
        if is_compressed:
            state = states.of(bucket.index(), x.size)
            pending = comms.reduction(0, bucket.index(), x, state, _pieces_of(bucket))()
        else:
            pending = communicator.allreduce(x, "avg", out=x, wait=False)
        work = Work(pending, [tensor], stage.finish, keeper)
        return work.get_future().then(lambda future: future.value()[0])

    return average


class _States:
    """The state of compression of each bucket of DDP. It starts again from zero when DDP changes its buckets."""

    def __init__(self, kinds: Sequence[str]) -> None:
        self._kinds = kinds
        self._arrays: dict[int, dict[str, Array]] = {}

    def of(self, index: int, elements: int) -> dict[str, Array]:
        before = self._arrays.get(index)
        if before is None or any(array.size != elements for array in before.values()):
            self._arrays[index] = {kind: np.zeros(elements, np.float32) for kind in self._kinds}
        return self._arrays[index]


def _pieces_of(bucket: dist.GradBucket) -> list[Piece]:
    """Return the place of each gradient in a bucket, in which they lie one behind the other."""
    shapes = [tuple(gradient.shape) for gradient in bucket.gradients()]
    stops = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    return [
        Piece(start, stop, columns_of(shape))
        for start, stop, shape in zip([0, *stops], stops, shapes, strict=False)
        if start < stop
    ]
