"""Device adapters: how GPU arrays of each library are described, created, and ordered with the work of their stream.

This module never reads or writes elements. It presents a GPU array as a numpy array at the device address, of which
only address, shape and strides may be used. So the checks for host arrays in `arrays.operands` also serve GPU arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from unisono.collectives.arrays import operands
from unisono.collectives.arrays.device_detection import device_adapter_name
from unisono.collectives.arrays.dlpack import ForeignMemory, from_cuda_interface, from_dlpack
from unisono.collectives.arrays.operands import Operand
from unisono.collectives.device.result_array import DeviceArray
from unisono.errors import TransportUnavailableError, UsageError
from unisono.transports.contracts.call import AnyArray
from unisono.transports.cuda.device import LEGACY_STREAM, Device, Stream
from unisono.transports.cuda.devices import device_of, facts_of


@dataclass(frozen=True, slots=True)
class DeviceAdapter:
    """How GPU arrays of one library are used. `x` and `out` are the caller's arrays; errors call them `name`.

    Attributes:
        describe: ``describe(x, name)`` returns the address and layout of `x`. The device number is -1 if unknown.
        stream: ``stream(x)`` returns the handle of the stream that the caller uses `x` on now; None or 0 for the legacy
            default stream.
        empty: ``empty(shape, dtype, x, device, stream)`` returns a new array of the library, in C order, without
            initial elements.
        packed: ``packed(x)`` returns a contiguous copy, made on the caller's stream; None if the library cannot copy.
        touch: ``touch(out)`` tells the library that `out` changes.
    """

    describe: Callable[[Any, str], ForeignMemory]
    stream: Callable[[Any], int | None]
    empty: Callable[[tuple[int, ...], np.dtype[Any], Any, Device, Stream], Any]
    packed: Callable[[Any], Any] | None = None
    touch: Callable[[Any], None] = lambda out: None


class DeviceArrays:
    """The arrays of one call, all on one device. An `operands.Memory`, as `operands.HOST` is for host arrays.

    Attributes:
        owners: the objects that keep the memory of the arrays alive.
    """

    def __init__(self) -> None:
        self.owners: list[Any] = []
        self._new_arrays: list[Any] = []
        self._device: Device | None = None
        self._used: list[tuple[DeviceAdapter, Any]] = []

    @property
    def device(self) -> Device:
        """The device of all arrays."""
        assert self._device is not None, "every call has an array"
        return self._device

    def streams(self) -> list[Stream]:
        """Return the streams that the caller uses the arrays on now, each once.

        Raises:
            UsageError: one of them is being captured into a graph. A replay of the graph would not repeat the call.
        """
        streams = dict.fromkeys(Stream(adapter.stream(x) or LEGACY_STREAM) for adapter, x in self._used)
        if any(self.device.is_capturing(stream) for stream in streams):
            raise UsageError(
                "a stream of the arrays is being captured into a graph, and a graph cannot repeat a call between "
                "ranks: make the call before or after the capture"
            )
        return list(streams)

    def is_new(self, array: Any) -> bool:
        """Return whether an array was made by `new`."""
        return any(each is array for each in self._new_arrays)

    def source(self, x: Any, name: str = "x", *, any_order: bool = True) -> Operand:
        """Return the operand for an array that is read; see `operands.source`. The array's own library packs it.

        Raises:
            UsageError: as `operands.source`; or the array is strided, and its library cannot pack it.
            TransportUnavailableError: the device of the array cannot be used here.
        """
        adapter = self._adapter_of(x, name)
        operand = operands.to_read(self._view(adapter, x, name), name, any_order=any_order)
        if operand is not None:
            return operand
        if adapter.packed is None:
            raise UsageError(f"{name} is not contiguous, and only its library could pack it: pass a contiguous array")
        operand = operands.to_read(self._view(adapter, adapter.packed(x), name), name)
        assert operand is not None, "a packed array is contiguous"
        operand.is_packed = True
        return operand

    def target(self, out: Any, name: str = "out") -> Operand:
        """Return the operand for an array that is written; see `operands.target`. Raises the errors of `source`."""
        adapter = self._adapter_of(out, name)
        operand = operands.to_write(self._view(adapter, out, name), name)
        adapter.touch(out)
        return operand

    def new(self, shape: tuple[int, ...], like: Operand, *, zeros: bool = False) -> tuple[Any, Operand]:
        """Return a new array of the library of the call's first array, and its operand.

        `zeros` has no effect: the staged route writes the zeros of an exscan.
        """
        adapter, x = self._used[0]
        c_order_shape = shape if like.order == "C" else shape[::-1]
        created = adapter.empty(c_order_shape, like.flat.dtype, x, self.device, self.streams()[0])
        flat = self._view(self._adapter_of(created, "out"), created, "out").reshape(-1)
        array = created if like.order == "C" else created.T
        self._new_arrays.append(array)
        return array, Operand(flat, like.dtype, shape, like.order)

    def wrapped(self, array: Any, x: Any) -> tuple[Any, None]:
        """Return `array` and None, because `new` creates arrays of the caller's library."""
        return array, None

    def _adapter_of(self, x: Any, name: str) -> DeviceAdapter:
        adapter_name = device_adapter_name(x)
        if adapter_name is None:
            raise UsageError(f"{name} is on another device than the other arrays of this call: copy it to their device")
        return _adapter(adapter_name)

    def _view(self, adapter: DeviceAdapter, x: Any, name: str) -> AnyArray:
        """Return a numpy array at the address of `x`, and keep the memory of `x` alive."""
        memory = adapter.describe(x, name)
        device = _device_of(memory, name)
        if self._device is not None and self._device is not device:
            raise UsageError(
                f"{name} is on cuda:{device.ordinal}, but another array is on cuda:{self._device.ordinal}: "
                "pass arrays on one device"
            )
        self._device = device
        self._used.append((adapter, x))
        self.owners.append(memory.owner)
        view = memory.view()
        if operands.dtype_of(view, name).is_moved_as_bytes:
            raise UsageError(f"{name} has dtype {view.dtype}, which is sent from host memory only: copy it there")
        if not view.flags.aligned:  # a kernel that reads it would fail, and destroy the CUDA context
            raise UsageError(
                f"{name} is not aligned: its elements do not begin at multiples of {view.dtype.alignment} bytes, "
                "as a GPU requires: pass a copy"
            )
        return view


def _device_of(memory: ForeignMemory, name: str) -> Device:
    """Return the device that an array is on; device 0 for an empty array that does not name its device.

    Raises:
        TransportUnavailableError: there is no driver, or it cannot be used.
        UsageError: the address is not in the memory of a device.
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


# --- protocols -----------------------------------------------------------------------------------------------------


def _interface_stream(x: Any) -> int | None:
    stream: int | None = x.__cuda_array_interface__.get("stream")
    return stream


def _dlpack_memory(x: Any, name: str) -> ForeignMemory:
    # The library of `x` makes the legacy stream wait for the elements. Our work then waits for the legacy stream.
    return from_dlpack(x, name, stream=LEGACY_STREAM)


# --- libraries -----------------------------------------------------------------------------------------------------


def _cupy_memory(x: Any, name: str) -> ForeignMemory:
    # `__cuda_array_interface__` would not do: it has no names for the dtypes of ml_dtypes.
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

# Keys are the names that `device_adapter_name` returns.
_ADAPTERS: dict[str, Callable[[], DeviceAdapter]] = {
    "torch.Tensor": _torch,
    f"{DeviceArray.__module__}.{DeviceArray.__name__}": lambda: DeviceAdapter(
        lambda x, _: x.memory(), lambda x: x.stream, DeviceArray.empty
    ),
    "cupy.ndarray": lambda: DeviceAdapter(_cupy_memory, _cupy_stream, _cupy_empty, _cupy_packed),
    "__cuda_array_interface__": lambda: DeviceAdapter(from_cuda_interface, _interface_stream, DeviceArray.empty),
    "__dlpack__": lambda: DeviceAdapter(_dlpack_memory, lambda x: LEGACY_STREAM, DeviceArray.empty),
}


@cache
def _adapter(name: str) -> DeviceAdapter:
    return _ADAPTERS[name]()
