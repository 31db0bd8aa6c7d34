"""`ContextFence`: all work that a process has issued to a device so far, on any stream, by any library.

Theory of operation
-------------------
An event of the whole context is behind that work (`cuCtxRecordEvent`). The driver cannot record it while a stream of
the context records a graph: the call would fail, and the graph would be lost. So the fence waits for the end of
recordings that it can see: those of this library, which hold a lock, and those of streams that block the legacy stream.
The driver shows no others.

Drivers before CUDA 12.5 lack that call. There the fence waits for the context (`cuCtxSynchronize`), which has the same
rule but takes long, so it cannot hold the lock. `CudaDevice` records no graphs there.
"""

from __future__ import annotations

import threading
from typing import Any

from unisono.errors import UsageError
from unisono.transports.cuda.device import LEGACY_STREAM
from unisono.transports.cuda.driver_api.context import CurrentContext
from unisono.transports.cuda.driver_api.errors import ContextLostError, Driver

# The first version of CUDA whose drivers record events of a context.
_EVENTS_VERSION = (12, 5)


def has_context_events(driver: Driver) -> bool:
    """Return whether a driver records events of a context."""
    return driver.version >= _EVENTS_VERSION


class ContextFence:
    """The work that has been issued before the first call of `is_over`. One thread uses it.

    Args:
        driver: the driver.
        context: the context.
        recordings: a lock that is held while this library records a graph.
    """

    def __init__(self, driver: Driver, context: CurrentContext, recordings: threading.Lock) -> None:
        self._driver, self._context, self._recordings = driver, context, recordings
        self._event: Any = None

    def is_over(self) -> bool:
        """Return whether the device has done the work, or has failed; blocks only with an old driver."""
        try:
            with self._context:
                if not has_context_events(self._driver):
                    return self._has_waited()
                if self._event is None:
                    self._event = self._recorded()
                return self._event is not None and self._has_happened()
        except ContextLostError:
            return True

    def _recorded(self) -> Any:
        """Return an event that happens after the work; None while a stream records a graph."""
        driver = self._driver
        with self._recordings:
            if self._is_recording():
                return None
            event = driver("cuEventCreate", int(driver.api.CUevent_flags.CU_EVENT_DISABLE_TIMING))
            try:
                driver("cuCtxRecordEvent", self._context.handle, event)
            except UsageError:
                driver("cuEventDestroy", event)
                return None
        return event

    def _has_happened(self) -> bool:
        (result,) = self._driver.attempt("cuEventQuery", self._event)
        if result == self._driver.api.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if int(result):
            raise self._driver.error("cuEventQuery", result)
        self._driver("cuEventDestroy", self._event)
        return True

    def _has_waited(self) -> bool:
        if self._is_recording():
            return False
        try:
            self._driver("cuCtxSynchronize")
        except UsageError:
            return False
        return True

    def _is_recording(self) -> bool:
        try:
            self._driver("cuStreamIsCapturing", LEGACY_STREAM)
        except UsageError:
            return True
        return False
