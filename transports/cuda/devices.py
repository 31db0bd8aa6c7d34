"""The devices that this process uses. Each is opened when the first array on it is seen."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from unisono.transports.cuda.device import Device, PointerFacts

Factory: TypeAlias = Callable[[int], Device]


def _driver(ordinal: int) -> Device:
    from unisono.transports.cuda.driver_api.cuda_device import CudaDevice

    return CudaDevice(ordinal)


def _current_of_driver() -> int:
    from unisono.transports.cuda.driver_api.cuda_device import current_ordinal

    return current_ordinal()


_lock = threading.Lock()  # guards the following variables
_factory: Factory = _driver
_opened: dict[tuple[int, int], Device] = {}  # by process and number, because a forked child cannot use them


def device_of(ordinal: int) -> Device:
    """Return the device with this number, and open it on first use.

    Raises:
        TransportUnavailableError: there is no such device, or no driver, or the driver is too old.
    """
    place = os.getpid(), ordinal
    if (device := _opened.get(place)) is not None:  # atomic, so the usual call takes no lock
        return device
    with _lock:
        if place not in _opened:
            _opened[place] = _factory(ordinal)
        return _opened[place]


def current_ordinal() -> int:
    """Return the number of the device that is current in this thread, as libraries set it; 0 if none is.

    Raises:
        TransportUnavailableError: there is no driver.
    """
    with _lock:
        is_driver = _factory is _driver
    return _current_of_driver() if is_driver else 0


def facts_of(pointer: int, ordinal: int) -> PointerFacts:
    """Return the driver's information about an address, by way of device `ordinal`; raises as `device_of` does."""
    return device_of(ordinal).facts(pointer)


@contextmanager
def replaced(factory: Factory) -> Iterator[None]:
    """Make devices by `factory` in a with-block. For tests without a GPU."""
    global _factory, _opened
    with _lock:
        before, _factory, _opened = (_factory, _opened), factory, {}
    try:
        yield
    finally:
        with _lock:
            _factory, _opened = before
