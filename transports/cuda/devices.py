"""The devices that this process uses: each is opened once, when an array on it is first seen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from unisono.transports.cuda.device import Device, PointerFacts

Factory: TypeAlias = Callable[[int], Device]


def _driver(ordinal: int) -> Device:
    from unisono.transports.cuda.driver import CudaDevice

    return CudaDevice(ordinal)


_lock = threading.Lock()  # of what follows
_factory: Factory = _driver
_opened: dict[int, Device] = {}


def device_of(ordinal: int) -> Device:
    """Return the device of this number, opened if it has not been.

    Raises:
        TransportUnavailableError: there is no such device, no driver, or one that is too old.
    """
    with _lock:
        if ordinal not in _opened:
            _opened[ordinal] = _factory(ordinal)
        return _opened[ordinal]


def facts_of(pointer: int, ordinal: int) -> PointerFacts:
    """Return what the driver knows of an address, asked by way of the device `ordinal`; raises as `device_of` does."""
    return device_of(ordinal).facts(pointer)


@contextmanager
def replaced(factory: Factory) -> Iterator[None]:
    """Let devices be made by `factory` in a with-block, as the tests do that have no GPU."""
    global _factory, _opened
    with _lock:
        before, _factory, _opened = (_factory, _opened), factory, {}
    try:
        yield
    finally:
        with _lock:
            _factory, _opened = before
