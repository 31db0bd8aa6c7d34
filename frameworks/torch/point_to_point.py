"""Messages from rank to rank, as torch.distributed calls for them."""

from __future__ import annotations

from typing import Any

from unisono import ANY_SOURCE, Communicator
from unisono.frameworks.torch.collectives import call, check_gpu
from unisono.frameworks.torch.dynamo_skip import untraced
from unisono.frameworks.torch.tensors import Stage
from unisono.frameworks.torch.work import Kept, ReceivedFrom, Work


@untraced
class Messages:
    """Sends and receives over a communicator, which the process group sets. They never wait for collectives."""

    _communicator: Communicator
    _kept: Kept

    @call
    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        """Send a tensor to a rank of the group."""
        (tensor,) = tensors
        stage = Stage(takes_gpu=True)
        x = stage.read(tensor)
        if stage.has_gpu:
            check_gpu(self)
        work = self._communicator.send(x, dst, tag, wait=False)
        return Work(work, tensors, stage.finish, self._kept)

    @call
    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        """Receive a tensor, of the dtype and number of elements that are sent, from a rank of the group."""
        return self._receive(Work, tensors, src, tag)

    @call
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receive a tensor from whichever rank has sent one with this tag; the work tells from which."""
        return self._receive(ReceivedFrom, tensors, ANY_SOURCE, tag)

    def _receive(self, kind: type[Work], tensors: Any, source: Any, tag: int) -> Work:
        (tensor,) = tensors
        stage = Stage(takes_gpu=True)
        out = stage.write(tensor)
        if stage.has_gpu:
            check_gpu(self)
        work = self._communicator.recv(out, source, tag, wait=False)
        return kind(work, tensors, stage.finish, self._kept)
