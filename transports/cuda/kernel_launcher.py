"""`Launcher`: compiles, loads and launches kernels on one device, each when it is first used.

A grid has a block for every 512 threads with work, but no more blocks than the device runs at a time. Kernels loop over
the rest.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from unisono.errors import TransportUnavailableError
from unisono.transports.cuda.cache import built
from unisono.transports.cuda.compiler import is_ptx, target_for, version
from unisono.transports.cuda.driver_errors import INSTALL_DRIVER, Driver
from unisono.transports.cuda.kernel_catalogue import BLOCK_THREADS, Kernel

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


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A kernel on the device: its function, and the number of blocks that run at a time."""

    function: Any
    most_blocks: int


class Launcher:
    """Launches kernels on one device. The device's context must be current during each call."""

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
        require_suitable(driver.version, version(), self._target)

    def launch(
        self, key: Any, kernel: Callable[[], Kernel], units: int, parameters: Sequence[Parameter], stream: int
    ) -> None:
        """Launch a kernel.

        Args:
            key: identifies the kernel.
            kernel: returns the kernel; called on first use only.
            units: the number of threads with work.
            parameters: the parameters of the kernel.
            stream: the stream to issue to.
        """
        loaded = self._loaded.get(key)
        if loaded is None:
            loaded = self._loaded[key] = self._load(kernel())
        blocks = max(1, min(-(-units // BLOCK_THREADS), loaded.most_blocks))
        values, types = zip(*parameters, strict=True)
        self._driver(
            "cuLaunchKernel", loaded.function, blocks, 1, 1, BLOCK_THREADS, 1, 1, 0, stream, (values, types), 0
        )

    def _load(self, kernel: Kernel) -> _Loaded:
        module = self._driver("cuModuleLoadData", built(kernel, self._target, self._folder))
        function = self._driver("cuModuleGetFunction", module, kernel.name.encode())
        at_a_time = self._driver("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, BLOCK_THREADS, 0)
        return _Loaded(function, at_a_time * self._multiprocessors)


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
