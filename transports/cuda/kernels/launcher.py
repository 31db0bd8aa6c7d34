"""`Launcher`: compiles, loads and launches kernels on one device, each when it is first used.

A grid has as many threads as there is work for, but no more blocks than the device runs at a time. Kernels loop over
the rest.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from unisono.dtypes import DType
from unisono.errors import TransportUnavailableError
from unisono.operations import Op
from unisono.transports.cuda.device import DeviceCopy
from unisono.transports.cuda.driver_api.errors import INSTALL_DRIVER, Driver
from unisono.transports.cuda.kernels.cache import built
from unisono.transports.cuda.kernels.catalogue import (
    BLOCK_THREADS,
    COPY_EXTENTS,
    MOST_SOURCES,
    Kernel,
    dequantise,
    quantise,
    reduction,
    scaling,
)
from unisono.transports.cuda.kernels.compiler import is_ptx, target_for, version
from unisono.transports.cuda.kernels.quantised_form import quantised_nbytes, scales_offset

_PACK_NBYTES = 16
# The first version of CUDA whose drivers load the code of a kernel by a call of its own.
_LOADS_VERSION = (12, 4)
# A block of threads copies at most this part of an extent, so that large extents use all multiprocessors.
_PIECE_NBYTES = 256 << 10
# A parameter in the binding's form: a value and its type, or a structure and None.
Parameter: TypeAlias = tuple[Any, Any]


def as_pointer(address: int) -> Parameter:
    """Return an address as a kernel parameter."""
    return address, ctypes.c_void_p


def as_number(value: int) -> Parameter:
    """Return a count as a kernel parameter."""
    return value, ctypes.c_uint64


def as_pointers(addresses: Sequence[int]) -> Parameter:
    """Return several addresses as one kernel parameter."""
    return _addresses(len(addresses))((ctypes.c_void_p * len(addresses))(*addresses)), None


def as_scalar(value: bytes) -> Parameter:
    """Return an element, given by its bytes in memory, as a kernel parameter."""
    return _element(len(value)).from_buffer_copy(value), None


@functools.cache
def _addresses(count: int) -> Any:
    return type("Sources", (ctypes.Structure,), {"_fields_": [("at", ctypes.c_void_p * count)]})


@functools.cache
def _element(nbytes: int) -> Any:
    return type("Element", (ctypes.Structure,), {"_fields_": [("bytes", ctypes.c_ubyte * nbytes)]})


def packed(parameter: Parameter) -> bytes:
    """Return the bytes of a kernel parameter."""
    value, kind = parameter
    return bytes(value if kind is None else kind(value))


class KernelLaunch(NamedTuple):
    """A kernel and its parameters.

    Attributes:
        key: identifies the kernel.
        kernel: returns the kernel; called on first use only.
        units: the number of threads with work.
        parameters: the parameters of the kernel.
    """

    key: Any
    kernel: Callable[[], Kernel]
    units: int
    parameters: Sequence[Parameter]


def reduction_launch(
    dst: int, sources: tuple[Parameter, ...], k: int, count: int, dtype: DType, op: Op, divisor: int
) -> KernelLaunch:
    """Return the launch of a reduction of `k` arrays, whose addresses are the parameters `sources`."""
    # Not the operation's name, which the same operation without its last step has too.
    key = (dtype.name, op.combine, op.lower, min(k, MOST_SOURCES + 1))
    parameters = (as_pointer(dst), *sources, as_number(count), as_number(divisor))
    return KernelLaunch(key, lambda: reduction(dtype, op, k), _packs(count * dtype.itemsize), parameters)


def scaling_launch(dst: int, src: int, factor: bytes, count: int, dtype: DType) -> KernelLaunch:
    """Return the launch of a multiplication by a factor; `factor` holds its bytes."""
    parameters = (as_pointer(dst), as_pointer(src), as_scalar(factor), as_number(count))
    return KernelLaunch(("lift", dtype.name), lambda: scaling(dtype), _packs(count * dtype.itemsize), parameters)


def pieces_of(extents: Sequence[DeviceCopy]) -> list[DeviceCopy]:
    """Cut extents into pieces that a block of threads copies at a time. Empty extents have none."""
    return [
        DeviceCopy(dst + start, src + start, min(_PIECE_NBYTES, nbytes - start))
        for dst, src, nbytes in extents
        for start in range(0, nbytes, _PIECE_NBYTES)
    ]


def extents_launch(table: int, count: int) -> KernelLaunch:
    """Return the launch that copies the extents of a table, each by a block of threads."""
    return KernelLaunch("extents", lambda: COPY_EXTENTS, count * BLOCK_THREADS, (as_pointer(table), as_number(count)))


def quantise_launch(
    codes: int, src: int, residual: int, count: int, dtype: DType, form: DType, feeds: bool, weight: float
) -> KernelLaunch:
    """Return the launch of a quantisation; the arguments are those of `Device.quantise`."""
    parameters = (
        *(as_pointer(codes), as_pointer(codes + scales_offset(form, count)), as_pointer(residual), as_pointer(src)),
        *(as_number(count), as_number(int(feeds)), (weight, ctypes.c_float)),
    )
    key = ("quantise", dtype.name, form.name)
    return KernelLaunch(key, lambda: quantise(dtype, form), _packs(count * dtype.itemsize), parameters)


def dequantise_launch(
    dst: int, codes: int, rows: int, count: int, dtype: DType, form: DType, divisor: int, stride: int
) -> KernelLaunch:
    """Return the launch that adds up quantised arrays; the arguments are those of `Device.dequantise`."""
    parameters = (
        *(as_pointer(dst), as_pointer(codes), as_pointer(codes + scales_offset(form, count)), as_number(rows)),
        *(as_number(stride or quantised_nbytes(form, count)), as_number(divisor), as_number(count)),
    )
    key = ("dequantise", dtype.name, form.name)
    return KernelLaunch(key, lambda: dequantise(dtype, form), _packs(count * dtype.itemsize), parameters)


def _packs(nbytes: int) -> int:
    """Return the number of packs in the result of a kernel. Each of its threads writes one."""
    return -(-nbytes // _PACK_NBYTES)


@dataclass(slots=True)
class _Loaded:
    """A kernel on the device.

    Attributes:
        function: its function.
        threads: the threads of a block.
        most_blocks: the number of blocks that run at a time.
        is_on_device: whether its code is there. Drivers load the code late, at the first launch if not before.
    """

    function: Any
    threads: int
    most_blocks: int
    is_on_device: bool


class Launcher:
    """Launches kernels on one device. The device's context must be current during each call.

    Attributes:
        most_blocks: the most blocks of a kernel on some streams.
    """

    def __init__(self, driver: Driver, capability: tuple[int, int], multiprocessors: int, folder: Path | None) -> None:
        """Create a launcher for a device.

        Args:
            driver: the driver.
            capability: the device's compute capability.
            multiprocessors: the number of its multiprocessors.
            folder: the folder for compiled kernels; None keeps none.

        Raises:
            TransportUnavailableError: the device is too old, NVRTC is not installed, or NVRTC is newer than the driver.
        """
        self._driver = driver
        self._target = target_for(capability)
        self._multiprocessors = multiprocessors
        self._folder = folder
        self._loaded: dict[Any, _Loaded] = {}
        self.most_blocks: dict[int, int] = {}
        require_suitable(driver.version, version(), self._target)

    def launch(self, launch: KernelLaunch, stream: int) -> None:
        """Launch a kernel: issue it to `stream`."""
        loaded, blocks = self._prepared(launch, stream)
        values, types = zip(*launch.parameters, strict=True)
        call = self._driver if loaded.is_on_device else self._driver.relaxed
        call("cuLaunchKernel", loaded.function, blocks, 1, 1, loaded.threads, 1, 1, 0, stream, (values, types), 0)
        loaded.is_on_device = True

    def load(self, launch: KernelLaunch) -> None:
        """Load the kernel of a launch, for which the driver may wait until the device has done its work."""
        if launch.key not in self._loaded:
            self._loaded[launch.key] = self._load(launch.kernel())

    def prepared(self, launch: KernelLaunch, stream: int) -> tuple[int, int, int]:
        """Return the number of the function of a kernel, and the numbers of blocks and of their threads on `stream`."""
        loaded, blocks = self._prepared(launch, stream)
        return self._driver.number_of(loaded.function), blocks, loaded.threads

    def _prepared(self, launch: KernelLaunch, stream: int) -> tuple[_Loaded, int]:
        self.load(launch)
        loaded = self._loaded[launch.key]
        most = min(loaded.most_blocks, self.most_blocks.get(stream, loaded.most_blocks))
        return loaded, max(1, min(-(-launch.units // loaded.threads), most))

    def _load(self, kernel: Kernel) -> _Loaded:
        module = self._driver("cuModuleLoadData", built(kernel, self._target, self._folder))
        function = self._driver("cuModuleGetFunction", module, kernel.name.encode())
        is_on_device = self._driver.version >= _LOADS_VERSION
        if is_on_device:
            self._driver("cuFuncLoad", function)
        at_a_time = self._driver("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, kernel.threads, 0)
        return _Loaded(function, kernel.threads, at_a_time * self._multiprocessors, is_on_device)


def require_suitable(driver: tuple[int, int], compiler: tuple[int, int], target: str) -> None:
    """Raise `TransportUnavailableError` if the driver cannot load NVRTC's code for `target`.

    Args:
        driver: the CUDA version of the driver.
        compiler: the CUDA version of NVRTC.
        target: as `compiler.target_for` returns it.
    """
    # Every driver of the same major version loads machine code, but only a driver of at least NVRTC's version loads
    # PTX.
    if driver < (compiler if is_ptx(target) else (compiler[0], 0)):
        raise TransportUnavailableError(
            f"the driver of the GPU is of CUDA {driver[0]}.{driver[1]}, which is too old for code of NVRTC "
            f"{compiler[0]}.{compiler[1]}: {INSTALL_DRIVER}"
        )
