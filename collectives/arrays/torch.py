"""Torch tensors as numpy arrays in the same memory, and back; on a GPU, the place of a tensor's memory.

Used by: `adapters` and `device.adapters`, which import this module at the first tensor, when torch has been imported.
`let_core_read` then lets the call cache read tensors without views.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch

from unisono.collectives.arrays.dlpack import ForeignMemory
from unisono.collectives.arrays.makers import MAKERS, ArrayMaker
from unisono.collectives.arrays.refusals import in_device_memory
from unisono.errors import UsageError
from unisono.foundation.once import once_per_process
from unisono.transports import _core
from unisono.transports.contracts.call import AnyArray

# Torch dtypes that `Tensor.numpy` refuses: an integer dtype of the same size, to view the tensor as, and numpy's dtype.
_BITS: dict[Any, tuple[Any, np.dtype[Any]]] = {
    torch.bfloat16: (torch.int16, np.dtype(ml_dtypes.bfloat16)),
    torch.float8_e4m3fn: (torch.int8, np.dtype(ml_dtypes.float8_e4m3fn)),
    torch.float8_e5m2: (torch.int8, np.dtype(ml_dtypes.float8_e5m2)),
}
_TENSOR_DTYPES: dict[np.dtype[Any], Any] = {dtype: tensor_dtype for tensor_dtype, (_, dtype) in _BITS.items()}

_OBSTACLES: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda x: x.layout is not torch.strided, "is sparse: pass {name}.to_dense()"),
    (lambda x: x.requires_grad, "requires grad, and collectives are not differentiated: pass {name}.detach()"),
    (lambda x: x.is_conj(), "is conjugated only when it is read: pass {name}.resolve_conj()"),
    (lambda x: x.is_neg(), "is negated only when it is read: pass {name}.resolve_neg()"),
    (lambda x: x.numel() > 0 and x.data_ptr() == 0, "has no memory: the program has freed its storage"),
)


# The numbers by which DLPack names types of elements, with their bits.
_DLPACK_TYPES: tuple[tuple[int, int, Any], ...] = (
    *((0, bits, np.dtype(f"int{bits}")) for bits in (8, 16, 32, 64)),
    *((1, bits, np.dtype(f"uint{bits}")) for bits in (8, 16, 32, 64)),
    *((2, bits, np.dtype(f"float{bits}")) for bits in (16, 32, 64)),
    (4, 16, _BITS[torch.bfloat16][1]),
    *((5, bits, np.dtype(f"complex{bits}")) for bits in (64, 128)),
    (6, 8, np.dtype(bool)),
    (10, 8, _BITS[torch.float8_e4m3fn][1]),
    (12, 8, _BITS[torch.float8_e5m2][1]),
)


@once_per_process
def let_core_read() -> None:
    """Let the call cache read tensors, if this version of torch exports its functions for that (2.10 and later)."""
    table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if table is None:
        return
    is_neg, is_conj = torch.Tensor.is_neg, torch.Tensor.is_conj
    _core.learn_torch(
        torch.Tensor, table, _DLPACK_TYPES, is_neg, is_conj, torch._C._len_torch_function_stack, _touch_all
    )
    MAKERS[torch.Tensor] = ArrayMaker(
        lambda x: torch.empty_like(x) if x.is_cpu else None,
        lambda x: torch.zeros_like(x) if x.is_cpu else None,
        _of_shape,
    )


def view(x: Any, name: str) -> AnyArray:
    """Return the elements of the tensor `x`, which errors call `name`, as a numpy array in the same memory.

    Raises:
        UsageError: the tensor requires grad, is sparse, has no memory, or is conjugated or negated only when it is
            read.
        TransportUnavailableError: the tensor is on a device.
    """
    bits = _BITS.get(x.dtype)
    try:
        # A view as integers never requires grad, so numpy() would not refuse it. Of a tensor without memory it makes an
        # array with memory of its own.
        if not (bits and x.requires_grad) and not _is_freed(x):
            array: AnyArray = x.numpy() if bits is None else x.view(bits[0]).numpy().view(bits[1])
            return array
    except (RuntimeError, TypeError) as error:
        raise _refusal(x, name, str(error)) from None
    raise _refusal(x, name, "")


def view_to_write(x: Any, name: str) -> AnyArray:
    """Return `view(x, name)`, and tell autograd that the tensor changes. Raises the errors of `view`."""
    array = view(x, name)
    touch(x)
    return array


def wrap(array: AnyArray, _: Any) -> Any:
    """Return a tensor in the memory of `array`."""
    tensor_dtype = _TENSOR_DTYPES.get(array.dtype)
    if tensor_dtype is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(f"i{array.dtype.itemsize}")).view(tensor_dtype)


# --- tensors on a GPU ----------------------------------------------------------------------------------------------


def memory(x: Any, name: str) -> ForeignMemory:
    """Return the address, layout and device of a tensor on a GPU.

    Raises:
        UsageError: the tensor requires grad, is sparse, is conjugated or negated only when it is read, or has a dtype
            that numpy lacks.
    """
    for is_present, advice in _OBSTACLES:
        if is_present(x):
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
    """Return the handle of torch's current stream on the device of a tensor."""
    handle: int = torch.cuda.current_stream(x.device).cuda_stream
    return handle


def empty(shape: tuple[int, ...], dtype: Any, x: Any, device: object, stream: object) -> Any:
    """Return a new tensor on the device of `x`, with the dtype of `x`, in C order."""
    return x.detach().new_empty(shape)


def touch(x: Any) -> None:
    """Tell autograd that a tensor changes."""
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)


def _of_shape(x: Any, shape: tuple[int, ...]) -> Any:
    """Return a new tensor of this shape with the dtype of `x`; None on a GPU, and if there is no memory for it.

    The dispatcher, which makes the result then, raises the error that says so.
    """
    try:
        return x.new_empty(shape) if x.is_cpu else None
    except RuntimeError:
        return None


def _touch_all(xs: Any) -> None:
    """Tell autograd that a tensor changes, or each tensor in a list of arrays."""
    try:
        torch.autograd.graph.increment_version(xs)
    except (RuntimeError, TypeError):  # tensors of the inference mode have no versions, and numpy's arrays neither
        for x in (xs,) if isinstance(xs, torch.Tensor) else xs:
            if isinstance(x, torch.Tensor):
                touch(x)


def _is_freed(x: Any) -> bool:
    """Return whether a tensor has elements and no memory, as after ``x.untyped_storage().resize_(0)``."""
    return type(x) is torch.Tensor and x.data_ptr() == 0 and x.numel() > 0 and bool(x.is_cpu)


def _refusal(x: Any, name: str, reason: str) -> Exception:
    """Return the error that says why the tensor `x` has no view; `reason` is torch's, for cases not listed here."""
    if x.device.type != "cpu":
        return in_device_memory(name, str(x.device))
    for is_present, advice in _OBSTACLES:
        if is_present(x):
            return UsageError(f"{name} {advice.format(name=name)}")
    return UsageError(f"{name} is a tensor of {x.dtype} that cannot be read as a numpy array: {reason}")
