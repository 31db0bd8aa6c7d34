"""Sends and receives of a process group, as torch.distributed calls them."""

from __future__ import annotations

from typing import Any

from unisono import ANY_SOURCE, Communicator
from unisono.frameworks.torch.calls.dynamo_skip import skip_dynamo
from unisono.frameworks.torch.calls.tensors import GpuStage
from unisono.frameworks.torch.calls.work import AnySourceReceive, Work, WorkKeeper
from unisono.frameworks.torch.process_groups.collectives import check_gpu, torch_call


@skip_dynamo
class PointToPoint:
    """Sends and receives over a communicator, which the process group sets. They do not wait for collectives."""

    _communicator: Communicator
    _keeper: WorkKeeper

    @torch_call
    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        """Send a tensor to a rank of the group."""
        (tensor,) = tensors
        stage = GpuStage()
        x = stage.read(tensor)
        if stage.has_gpu:
            check_gpu(self)
        work = self._communicator.send(x, dst, tag, wait=False)
        return Work(work, tensors, stage.finish, self._keeper)

    @torch_call
    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        """Receive a tensor from a rank. It must have the dtype and number of elements of the sender's tensor."""
        return self._receive(Work, tensors, src, tag)

    @torch_call
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receive a tensor with this tag from any rank. The `source_rank` of the work is the sender."""
        return self._receive(AnySourceReceive, tensors, ANY_SOURCE, tag)

    def _receive(self, work_class: type[Work], tensors: Any, source: Any, tag: int) -> Work:
        (tensor,) = tensors
        stage = GpuStage()
        out = stage.write(tensor)
        if stage.has_gpu:
            check_gpu(self)
        work = self._communicator.recv(out, source, tag, wait=False)
        return work_class(work, tensors, stage.finish, self._keeper)
