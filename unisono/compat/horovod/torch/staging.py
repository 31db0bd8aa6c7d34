"""Tensors as the memory of a call, and results as tensors on the device of the caller."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from unisono.compat.horovod.errors import ArgumentError
from unisono.compat.horovod.requests import ReadyCall
from unisono.errors import UsageError
from unisono.frameworks.arrays import Array
from unisono.frameworks.torch.calls.tensors import CallTensors

_DEVICES = ("cpu", "cuda")


def check(tensor: Any, call: str) -> None:
    """Check that a tensor can be passed to a call.

    Raises:
        ArgumentError: it is no tensor, is sparse, or is on a device whose memory cannot be copied to the host.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{call} takes tensors of torch, not {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise ArgumentError(
            f"{call} takes dense tensors, not {tensor.layout}: use sparse_allreduce_async or to_dense()"
        )
    if tensor.device.type not in _DEVICES:
        raise ArgumentError(f"{call} takes tensors on {' or '.join(_DEVICES)}, not on {tensor.device}: move it first")


def signature(tensor: Any) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape, as a `ReadyCall` has them."""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


class Buffer:
    """Host memory with the elements of a tensor, which a call overwrites.

    Args:
        tensor: the tensor.
        in_place: whether the result belongs into the tensor itself. Then its memory is used, if it is contiguous and on
            the host.

    Attributes:
        memory: a contiguous tensor on the host, without a gradient.
    """

    def __init__(self, tensor: Any, *, in_place: bool) -> None:
        self._tensor, self._in_place = tensor, in_place
        plain = tensor.detach().resolve_conj().resolve_neg()
        if in_place and plain.is_contiguous() and plain.device.type == "cpu":
            self.memory = plain
        else:
            self.memory = torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)

    @property
    def array(self) -> Array:
        """The memory as an array, which keeps nothing alive."""
        return array_of(self.memory)

    def result(self) -> Any:
        """Return the tensor with the elements of the memory, or a new one on its device."""
        if not self._in_place:
            return self.memory.to(self._tensor.device)
        if self.memory.data_ptr() != self._tensor.data_ptr() or self._tensor.device.type != "cpu":
            self._tensor.detach().copy_(self.memory)
        return self._tensor


def read_only(tensor: Any) -> Any:
    """Return a contiguous tensor on the host that a call only reads."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def array_of(memory: Any) -> Array:
    """Return the array in the memory of a contiguous tensor on the host. The caller keeps the tensor alive.

    Raises:
        ArgumentError: the tensor has a dtype that cannot be sent.
    """
    try:
        flat: Array = CallTensors().read(memory)
    except UsageError as error:
        raise ArgumentError(error.message) from None
    shaped: Array = flat.reshape(memory.shape)
    return shaped


def tensor_of(array: Array, tensor: Any) -> Any:
    """Return a tensor in the memory of an array, or a copy on the device of `tensor`, with the dtype of `tensor`."""
    flat = torch.from_numpy(array.reshape(-1).view(np.uint8))
    return flat.view(tensor.dtype).view(array.shape).to(tensor.device)


def scale(memory: Any, factor: float) -> None:
    """Multiply a tensor in place. Integers are multiplied as float64, and the result is cut to an integer."""
    if factor == 1.0:
        return
    if memory.is_floating_point() or memory.is_complex():
        memory.mul_(factor)
    else:
        memory.copy_(memory.double().mul_(factor))


def device_of(tensors: Any) -> str:
    """Return the kinds of devices of tensors, as a `ReadyCall` has them."""
    return "+".join(sorted({tensor.device.type for tensor in tensors})) or "cpu"


def request(kind: str, name: str, tensors: Any, **facts: Any) -> ReadyCall:
    """Return the request for a call on tensors."""
    return ReadyCall(kind, name, tuple(map(signature, tensors)), device=device_of(tensors), **facts)
