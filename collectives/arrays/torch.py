"""Tensors of torch on the host: numpy arrays in the same memory, and back. This is loaded after torch has been."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch

from unisono.collectives.arrays.adapters import on_device
from unisono.collectives.arrays.dlpack import ForeignMemory
from unisono.errors import UsageError
from unisono.transports.contracts.call import AnyArray

# Types of torch that `Tensor.numpy` does not know: the integers that stand for them on the way, and numpy's types.
_BITS: dict[Any, tuple[Any, np.dtype[Any]]] = {
    torch.bfloat16: (torch.int16, np.dtype(ml_dtypes.bfloat16)),
    torch.float8_e4m3fn: (torch.int8, np.dtype(ml_dtypes.float8_e4m3fn)),
    torch.float8_e5m2: (torch.int8, np.dtype(ml_dtypes.float8_e5m2)),
}
_TENSORS: dict[np.dtype[Any], Any] = {dtype: tensor for tensor, (_, dtype) in _BITS.items()}

_OBSTACLES: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda x: x.layout is not torch.strided, "is sparse: pass {name}.to_dense()"),
    (lambda x: x.requires_grad, "requires grad, and collectives are not differentiated: pass {name}.detach()"),
    (lambda x: x.is_conj(), "is conjugated only when it is read: pass {name}.resolve_conj()"),
    (lambda x: x.is_neg(), "is negated only when it is read: pass {name}.resolve_neg()"),
)


def view(x: Any, name: str) -> AnyArray:
    """Return the elements of the tensor `x`, which errors call `name`, as a numpy array in the same memory.

    Raises:
        UsageError: the tensor requires grad, or its elements do not lie in memory as what they are.
        TransportUnavailableError: it is on a device.
    """
    bits = _BITS.get(x.dtype)
    try:
        if bits is None:
            plain: AnyArray = x.numpy()
            return plain
        if not x.requires_grad:  # integers never do, so that nothing would be refused
            array: AnyArray = x.view(bits[0]).numpy().view(bits[1])
            return array
    except (RuntimeError, TypeError) as error:
        raise _refusal(x, name, str(error)) from None
    raise _refusal(x, name, "")


def view_to_write(x: Any, name: str) -> AnyArray:
    """Return what `view` does, and let autograd know that the tensor changes. Raises what `view` does."""
    array = view(x, name)
    touch(x)
    return array


def wrap(array: AnyArray, _: Any) -> Any:
    """Return a tensor in the memory of `array`."""
    tensor = _TENSORS.get(array.dtype)
    if tensor is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(f"i{array.dtype.itemsize}")).view(tensor)


# --- tensors on a GPU ----------------------------------------------------------------------------------------------


def memory(x: Any, name: str) -> ForeignMemory:
    """Return where a tensor on a GPU lies.

    Raises:
        UsageError: the tensor requires grad, or its elements do not lie in memory as what they are.
    """
    for stands, advice in _OBSTACLES:
        if stands(x):
            raise UsageError(f"{name} {advice.format(name=name)}")
    bits = _BITS.get(x.dtype)
    try:
        dtype = np.dtype(str(x.dtype).removeprefix("torch.")) if bits is None else bits[1]
    except TypeError:
        raise UsageError(f"{name} is a tensor of {x.dtype}, which cannot be sent: convert it") from None
    strides = tuple(step * dtype.itemsize for step in x.stride())
    device = ("cuda", -1 if x.device.index is None else x.device.index)
    return ForeignMemory(x.data_ptr(), tuple(x.shape), strides, dtype, device, read_only=False, stream=None, owner=x)


def stream(x: Any) -> int:
    """Return the handle of the stream that torch uses now for the device of a tensor."""
    handle: int = torch.cuda.current_stream(x.device).cuda_stream
    return handle


def empty(shape: tuple[int, ...], dtype: Any, x: Any, device: object, stream: object) -> Any:
    """Return a new tensor on the device of `x`, of its type, in C order."""
    return x.detach().new_empty(shape)


def touch(x: Any) -> None:
    """Let autograd know that a tensor changes."""
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)


def _refusal(x: Any, name: str, otherwise: str) -> Exception:
    """Return the error that says why the tensor `x` has no view."""
    if x.device.type != "cpu":
        return on_device(name, str(x.device))
    for stands, advice in _OBSTACLES:
        if stands(x):
            return UsageError(f"{name} {advice.format(name=name)}")
    return UsageError(f"{name} is a tensor of {x.dtype} that cannot be read as a numpy array: {otherwise}")
