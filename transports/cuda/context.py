"""`CurrentContext`: the context of a device, which is current during each call of its driver."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from unisono.transports.cuda.driver_errors import ContextLostError, Driver


class CurrentContext:
    """Makes the context of a device current in the body. It is around every call of the driver.

    In the body, nothing else may make another context current and leave it so. Then an inner body costs no call of the
    driver.

    Attributes:
        handle: the context.
        is_lost: whether a call has found that the context has ended.
    """

    def __init__(self, driver: Driver, context: Any) -> None:
        self._driver = driver
        self.handle = context
        self._push, self._pop = driver.api.cuCtxPushCurrent, driver.api.cuCtxPopCurrent
        self.is_lost = False
        self._thread = _Depth()

    def __enter__(self) -> None:
        if self._thread.depth:
            self._thread.depth += 1
            return
        try:
            (result,) = self._push(self.handle)
        except (ValueError, KeyError) as error:  # as in `Driver.attempt`
            raise self._driver.unknown("cuCtxPushCurrent", error) from error
        if int(result):
            failure = self._driver.error("cuCtxPushCurrent", result)
            self.note(failure)
            raise failure
        self._thread.depth = 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.depth -= 1
        if not self._thread.depth:
            self._pop()
        if error is not None:
            self.note(error)

    def note(self, error: BaseException | None) -> None:
        """Note an error of a call of the driver."""
        if isinstance(error, ContextLostError):
            self.is_lost = True


class _Depth(threading.local):
    """The number of bodies that this thread is in."""

    depth = 0
