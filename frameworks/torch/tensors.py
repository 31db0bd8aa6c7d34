"""Tensors as collectives take them: flat numpy arrays in the same memory, or in a copy where that cannot be.

What is written here is not told to autograd, as with torch's own backends: FSDP gathers parameters into memory that
autograd has views of, and expects that no version changes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from unisono import UsageError

Array: TypeAlias = NDArray[Any]

# Types that `Tensor.numpy` does not know: the integers that stand for them on the way, and numpy's types.
_BITS: dict[Any, tuple[Any, np.dtype[Any]]] = {
    torch.bfloat16: (torch.int16, np.dtype(ml_dtypes.bfloat16)),
    torch.float8_e4m3fn: (torch.int8, np.dtype(ml_dtypes.float8_e4m3fn)),
    torch.float8_e5m2: (torch.int8, np.dtype(ml_dtypes.float8_e5m2)),
    # These are moved and not reduced, and so may be anything.
    torch.float8_e4m3fnuz: (torch.int8, np.dtype(np.int8)),
    torch.float8_e5m2fnuz: (torch.int8, np.dtype(np.int8)),
    torch.float8_e8m0fnu: (torch.int8, np.dtype(np.int8)),
    torch.complex32: (torch.int32, np.dtype(np.int32)),
}
ONLY_MOVED = frozenset({torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex32})

# Copies are short, and only one thread may make those of a call.
_finishing = threading.Lock()


class Stage:
    """The memory of one call, and what must be copied to tensors when it has ended."""

    __slots__ = ("_copies",)

    def __init__(self) -> None:
        self._copies: list[tuple[Any, Any]] = []

    def read(self, tensor: Any) -> Array:
        """Return the elements of a tensor, which is not written.

        Raises:
            UsageError: it is sparse, or of a type that cannot be moved.
        """
        return _flat(_on_host(tensor))

    def write(self, tensor: Any) -> Array:
        """Return memory whose elements a tensor gets in the end; they are its own now. Raises what `read` does."""
        host = _on_host(tensor)
        if host is not tensor and not (tensor.is_cpu and host.data_ptr() == tensor.data_ptr()):
            self._copies.append((tensor, host))
        return _flat(host)

    def read_all(self, tensors: Sequence[Any]) -> Array:
        """Return the elements of tensors, one after the other. Raises what `read` does, and if the types differ."""
        joined = _joined(tensors)
        return _flat(torch.cat([_on_host(each).reshape(-1) for each in tensors]) if joined is None else joined)

    def write_all(self, tensors: Sequence[Any]) -> Array:
        """Return memory whose elements tensors get in the end, one after the other; raises what `read_all` does."""
        joined = _joined(tensors)
        if joined is None:
            joined = torch.empty(sum(each.numel() for each in tensors), dtype=tensors[0].dtype)
            parts = joined.split([each.numel() for each in tensors])
            self._copies += [(each, part.view(each.shape)) for each, part in zip(tensors, parts, strict=True)]
        return _flat(joined)

    def finish(self) -> None:
        """Copy what must be copied; to be called when the call has ended, by as many threads as want to."""
        if self._copies:
            with _finishing, torch.no_grad():
                for tensor, host in self._copies:
                    tensor.copy_(host)
                self._copies = []


def _on_host(tensor: Any) -> Any:
    """Return the tensor itself, or one in the same memory, if it is contiguous on the host; or else a copy that is."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"a tensor of the layout {tensor.layout} goes through all_reduce alone: pass tensor.to_dense()"
        )
    if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().to("cpu", memory_format=torch.contiguous_format).contiguous()


def _flat(tensor: Any) -> Array:
    bits = _BITS.get(tensor.dtype)
    array: Array
    try:
        array = tensor.numpy() if bits is None else tensor.view(bits[0]).numpy().view(bits[1])
    except TypeError as error:
        raise UsageError(f"a tensor of {tensor.dtype} cannot be moved: {error}") from None
    return array if array.ndim == 1 else array.reshape(-1)


def _joined(tensors: Sequence[Any]) -> Any:
    """Return one flat tensor in the memory of all, if they lie there one after the other; otherwise None.

    Raises:
        UsageError: their types differ, or there are none.
    """
    if len({(each.dtype, each.device) for each in tensors}) != 1:
        kinds = ", ".join(dict.fromkeys(f"{each.dtype} on {each.device}" for each in tensors))
        raise UsageError(f"the tensors of a list must be of one dtype and device; got {kinds or 'none'}")
    full = [each for each in tensors if each.numel()]
    if not full:
        return tensors[0].detach().reshape(-1).cpu()
    first, end = full[0], full[0].data_ptr()
    for each in full:
        if not (each.is_cpu and each.layout is torch.strided and each.is_contiguous() and each.data_ptr() == end):
            return None
        if each.is_conj() or each.is_neg() or each.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += each.numel() * each.element_size()
    return first.detach().as_strided((sum(each.numel() for each in full),), (1,))
