"""`empty`: new arrays in registered memory of a GPU, which plans of other ranks read where they lie."""

from __future__ import annotations

import importlib
import re
import weakref
from math import prod
from typing import Any

import numpy as np

from unisono.collectives.arrays.dlpack import packed_strides
from unisono.collectives.device.result_array import DeviceArray, order_streams
from unisono.errors import UsageError
from unisono.transports.cuda.device import LEGACY_STREAM, Device, Stream
from unisono.transports.cuda.devices import current_ordinal, device_of
from unisono.transports.cuda.memory.registered import registry_of


def empty(shape: tuple[int, ...], dtype: np.dtype[Any], device: str) -> Any:
    """Return a new array on a GPU: of CuPy if that is installed and has the dtype, and else a `DeviceArray`.

    Args:
        shape: the extent of each dimension.
        dtype: the dtype of the elements, whose values are undefined.
        device: ``"cuda:N"``, or ``"cuda"`` for the device that is current in this thread.

    Raises:
        UsageError: `device` is something else.
        TransportUnavailableError: the device cannot be used here, or has too little memory.
    """
    memory = RegisteredMemory(device_of(_ordinal(device)), prod(shape) * dtype.itemsize)
    cupy = _cupy() if dtype.isbuiltin == 1 else None
    if cupy is None:
        return DeviceArray(memory, shape, packed_strides(shape, dtype.itemsize), dtype, LEGACY_STREAM)
    whole = cupy.cuda.UnownedMemory(memory.pointer, memory.nbytes, memory, memory.device.ordinal)
    return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(whole, 0))


class RegisteredMemory:
    """Registered memory, which is freed when no object refers to this one any more and no communicator holds it.

    Attributes:
        device, pointer, nbytes: the device, the address there, and the size.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        registry = registry_of(device)
        block = registry.new(nbytes)
        self.device = device
        self.pointer, self.nbytes = block.allocation.pointer, block.allocation.nbytes
        # At exit nothing is freed: the driver releases all memory of the process.
        weakref.finalize(self, registry.retire, block).atexit = False

    def lend(self, stream: Stream | None) -> None:
        """Do nothing: this memory is freed after all work of the process, on whatever stream."""

    def order(self, later: Stream, earlier: Stream) -> None:
        """Make later work of one stream wait for the work that the other stream has now."""
        order_streams(self.device, later, earlier)

    def note_use(self, stream: Stream) -> None:
        """Do nothing, as `lend`."""


def _ordinal(device: str) -> int:
    found = re.fullmatch(r"cuda(?::(\d+))?", device, re.ASCII) if isinstance(device, str) else None
    if found is None:
        raise UsageError(f"device must be 'cuda' or 'cuda:N', not {device!r}")
    return current_ordinal() if found[1] is None else int(found[1])


def _cupy() -> Any:
    try:
        return importlib.import_module("cupy")
    except ImportError:
        return None
