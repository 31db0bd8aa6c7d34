"""Kernels are compiled, loaded and launched on one device when they are first used.

A grid has as many blocks as there is work for, and at most those that the device runs at a time: kernels go over what
is left by loops.
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

# A parameter as the binding takes it: a value and its type, or a structure and None.
Parameter: TypeAlias = tuple[Any, Any]


def as_pointer(address: int) -> Parameter:
    """Return an address as a parameter."""
    return address, ctypes.c_void_p


def as_number(value: int) -> Parameter:
    """Return a count as a parameter."""
    return value, ctypes.c_uint64


def as_pointers(addresses: Sequence[int]) -> Parameter:
    """Return addresses as one parameter that holds them all."""
    return _addresses(len(addresses))((ctypes.c_void_p * len(addresses))(*addresses)), None


def as_scalar(value: bytes) -> Parameter:
    """Return an element, which lies in memory as `value`, as a parameter."""
    return _element(len(value)).from_buffer_copy(value), None


@functools.cache
def _addresses(count: int) -> Any:
    return type("Sources", (ctypes.Structure,), {"_fields_": [("at", ctypes.c_void_p * count)]})


@functools.cache
def _element(nbytes: int) -> Any:
    return type("Element", (ctypes.Structure,), {"_fields_": [("bytes", ctypes.c_ubyte * nbytes)]})


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A kernel on the device: its function, and how many of its blocks run at a time."""

    function: Any
    most_blocks: int


class Launcher:
    """Launches kernels on one device, whose context is current when it is called."""

    def __init__(self, driver: Driver, capability: tuple[int, int], multiprocessors: int, folder: Path) -> None:
        """Prepare for a device.

        Args:
            driver: the driver.
            capability: the device's compute capability.
            multiprocessors: how many it has.
            folder: where compiled kernels are kept.

        Raises:
            TransportUnavailableError: the device is too old, NVRTC is not installed, or is newer than the driver.
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
            key: by what the kernel is found again.
            kernel: returns it, when it is needed for the first time.
            units: how many threads have work.
            parameters: those of the kernel.
            stream: where it is issued to.
        """
        found = self._loaded.get(key)
        if found is None:
            found = self._loaded[key] = self._load(kernel())
        blocks = max(1, min(-(-units // BLOCK_THREADS), found.most_blocks))
        values, types = zip(*parameters, strict=True)
        self._driver("cuLaunchKernel", found.function, blocks, 1, 1, BLOCK_THREADS, 1, 1, 0, stream, (values, types), 0)

    def _load(self, kernel: Kernel) -> _Loaded:
        module = self._driver("cuModuleLoadData", built(kernel, self._target, self._folder))
        function = self._driver("cuModuleGetFunction", module, kernel.name.encode())
        at_a_time = self._driver("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, BLOCK_THREADS, 0)
        return _Loaded(function, at_a_time * self._multiprocessors)


def require_suitable(driver: tuple[int, int], compiler: tuple[int, int], target: str) -> None:
    """Raise `TransportUnavailableError` if a driver does not load what NVRTC makes for `target`.

    Args:
        driver: the version of CUDA that the driver is of.
        compiler: that of NVRTC.
        target: as `compiler.target_for` returns it.
    """
    # Machine code is loaded by all drivers of the same major version, PTX only by those that know it.
    if driver < (compiler if is_ptx(target) else (compiler[0], 0)):
        raise TransportUnavailableError(
            f"the driver of the GPU is of CUDA {driver[0]}.{driver[1]}, and too old for what NVRTC {compiler[0]}."
            f"{compiler[1]} makes: {INSTALL_DRIVER}"
        )
