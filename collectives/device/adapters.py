"""Arrays on a GPU: how those of each library are described, made, and ordered with the work of their stream.

Nothing here touches elements. An array is seen as one of numpy that lies at the address of the device, of which only
the address, shape and strides may be used; so everything that is checked of arrays of the host is checked of these too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from unisono.collectives.arrays import operands
from unisono.collectives.arrays.dlpack import ForeignMemory, from_cuda_interface, from_dlpack
from unisono.collectives.arrays.operands import Operand
from unisono.collectives.device.gateway import described_by
from unisono.collectives.device.result_array import DeviceArray
from unisono.errors import TransportUnavailableError, UsageError
from unisono.transports.contracts.call import AnyArray
from unisono.transports.cuda.device import LEGACY_STREAM, Device, Stream
from unisono.transports.cuda.devices import device_of, facts_of


@dataclass(frozen=True, slots=True)
class DeviceAdapter:
    """What is done with arrays of one kind. An `x` is the caller's array, and `name` what errors call it.

    Attributes:
        describe: ``describe(x, name)`` is where `x` lies. Its device may be unknown, and then has the number -1.
        stream: ``stream(x)`` is the stream that the caller uses `x` on now, by its handle; None or 0 for the legacy
            default stream.
        empty: ``empty(shape, dtype, x, device, stream)`` is a new array of the kind, in C order, with no elements yet.
        packed: ``packed(x)`` is a contiguous copy, made on the caller's stream; None where the library has none.
        touch: ``touch(out)`` lets its library know that `out` changes.
    """

    describe: Callable[[Any, str], ForeignMemory]
    stream: Callable[[Any], int | None]
    empty: Callable[[tuple[int, ...], np.dtype[Any], Any, Device, Stream], Any]
    packed: Callable[[Any], Any] | None = None
    touch: Callable[[Any], None] = lambda out: None


class DeviceArrays:
    """The arrays of one call, all on one device; what `operands.HOST` is to arrays of the host.

    Attributes:
        owners: what keeps their memory alive.
    """

    def __init__(self) -> None:
        self.owners: list[Any] = []
        self._made: list[Any] = []
        self._device: Device | None = None
        self._used: list[tuple[DeviceAdapter, Any]] = []

    @property
    def device(self) -> Device:
        """The device that they are on."""
        assert self._device is not None, "every call has an array"
        return self._device

    def streams(self) -> list[Stream]:
        """Return the streams that the caller uses the arrays on now, each once.

        Raises:
            UsageError: one records a graph, in which nothing that is done here would be repeated.
        """
        found = dict.fromkeys(Stream(kind.stream(x) or LEGACY_STREAM) for kind, x in self._used)
        if any(self.device.is_capturing(stream) for stream in found):
            raise UsageError(
                "a stream of the arrays is being captured into a graph, which would hold no call between ranks: "
                "call before the capture, or after it"
            )
        return list(found)

    def has_made(self, array: Any) -> bool:
        """Return whether an array was made by `new`."""
        return any(each is array for each in self._made)

    def source(self, x: Any, name: str = "x", *, any_order: bool = True) -> Operand:
        """See `operands.source`; what is packed is packed by the library of the array.

        Raises:
            UsageError: as there, and where the library has nothing to pack by.
            TransportUnavailableError: the device of the array cannot be used here.
        """
        kind = self._kind_of(x, name)
        operand = operands.to_read(self._view(kind, x, name), name, any_order=any_order)
        if operand is not None:
            return operand
        if kind.packed is None:
            raise UsageError(f"{name} is not contiguous, and only its library could pack it: pass a contiguous array")
        operand = operands.to_read(self._view(kind, kind.packed(x), name), name)
        assert operand is not None, "what has been packed is contiguous"
        operand.is_packed = True
        return operand

    def target(self, out: Any, name: str = "out") -> Operand:
        """See `operands.target`; raises what `source` does."""
        kind = self._kind_of(out, name)
        operand = operands.to_write(self._view(kind, out, name), name)
        kind.touch(out)
        return operand

    def new(self, shape: tuple[int, ...], like: Operand, *, zeros: bool = False) -> tuple[Any, Operand]:
        """See `operands.new`; of the kind of the first array of the call. Nobody fills it."""
        kind, x = self._used[0]
        in_order = shape if like.order == "C" else shape[::-1]
        made = kind.empty(in_order, like.flat.dtype, x, self.device, self.streams()[0])
        flat = self._view(kind, made, "out").reshape(-1)
        array = made if like.order == "C" else made.T
        self._made.append(array)
        return array, Operand(flat, like.dtype, shape, like.order)

    def wrapped(self, array: Any, x: Any) -> tuple[Any, None]:
        """See `kinds.wrapped`: what `new` makes is of the caller's kind already."""
        return array, None

    def _kind_of(self, x: Any, name: str) -> DeviceAdapter:
        kind = device_kind_of(x)
        if kind is None:
            raise UsageError(f"{name} is not on the device that other arrays of this call are on: copy it there")
        return kind

    def _view(self, kind: DeviceAdapter, x: Any, name: str) -> AnyArray:
        """Return an array of numpy at the address of `x`, and keep the memory of `x` alive."""
        memory = kind.describe(x, name)
        device = _device_of(memory, name)
        if self._device is not None and self._device is not device:
            raise UsageError(
                f"the arrays of a call are on one device, and {name} is on cuda:{device.ordinal}, but another array is "
                f"on cuda:{self._device.ordinal}"
            )
        self._device = device
        self._used.append((kind, x))
        self.owners.append(memory.owner)
        view = memory.view()
        if not view.flags.aligned:  # which would end the context of the device, and all work there
            raise UsageError(
                f"{name} is not aligned: its elements do not begin at multiples of {view.dtype.alignment} bytes, "
                "where alone a GPU takes them: pass a copy"
            )
        return view


def device_kind_of(x: Any) -> DeviceAdapter | None:
    """Return the kind of an array that is on a GPU; None of anything else."""
    name = described_by(x)
    return None if name is None else _kind(name)


def _device_of(memory: ForeignMemory, name: str) -> Device:
    """Return the device that an array is on; that of one which has no elements and does not tell is the first.

    Raises:
        TransportUnavailableError: there is no driver, or none that can be used.
        UsageError: the address is not one of a device.
    """
    ordinal = memory.device[1]
    try:
        if ordinal >= 0 or not memory.pointer:
            return device_of(max(0, ordinal))
        facts = facts_of(memory.pointer, 0)
        if facts.kind == "host":
            raise UsageError(f"{name} says that it is on a device, but its address is one of the host")
        return device_of(max(0, facts.ordinal))
    except TransportUnavailableError as error:
        raise TransportUnavailableError(
            f"{name} is on the device cuda, which cannot be used here ({error.message}): copy it to the host, and the "
            "result back"
        ) from error


# --- what only the protocols tell about ----------------------------------------------------------------------------


def _interface_stream(x: Any) -> int | None:
    stream: int | None = x.__cuda_array_interface__.get("stream")
    return stream


def _dlpack_memory(x: Any, name: str) -> ForeignMemory:
    # The library of `x` lets the legacy stream wait for it, and later waits for that.
    return from_dlpack(x, name, stream=LEGACY_STREAM)


# --- libraries -----------------------------------------------------------------------------------------------------


def _cupy_memory(x: Any, name: str) -> ForeignMemory:
    # Not by the interface, which has no names for the types of ml_dtypes.
    return ForeignMemory(
        x.data.ptr, x.shape, x.strides, np.dtype(x.dtype), ("cuda", x.device.id), read_only=False, stream=None, owner=x
    )


def _cupy_stream(x: Any) -> int | None:
    stream: int = sys.modules["cupy"].cuda.get_current_stream(x.device.id).ptr
    return stream


def _cupy_empty(shape: tuple[int, ...], dtype: np.dtype[Any], x: Any, device: Device, stream: Stream) -> Any:
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(x.device.id):
        return cupy.empty(shape, dtype)


def _cupy_packed(x: Any) -> Any:
    return sys.modules["cupy"].ascontiguousarray(x)


def _torch() -> DeviceAdapter:
    from unisono.collectives.arrays import torch

    return DeviceAdapter(torch.memory, torch.stream, torch.empty, lambda x: x.contiguous(), torch.touch)


# --- the table -----------------------------------------------------------------------------------------------------

# By what `described_by` says.
_KINDS: dict[str, Callable[[], DeviceAdapter]] = {
    "torch": _torch,
    "cupy": lambda: DeviceAdapter(_cupy_memory, _cupy_stream, _cupy_empty, _cupy_packed),
    "__cuda_array_interface__": lambda: DeviceAdapter(from_cuda_interface, _interface_stream, DeviceArray.empty),
    "__dlpack__": lambda: DeviceAdapter(_dlpack_memory, lambda x: LEGACY_STREAM, DeviceArray.empty),
}


@cache
def _kind(name: str) -> DeviceAdapter:
    return _KINDS[name]()
