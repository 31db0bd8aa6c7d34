"""`CurrentContext`: the context of a device, which is current during each call of its driver."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from unisono.transports.cuda.driver_api.errors import ContextLostError, Driver


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

    def __enter__(self) -> None:
        entered = _thread.entered
        if entered and entered[-1] is self:
            entered.append(self)
            return
        try:
            (result,) = self._push(self.handle)
        except (ValueError, KeyError) as error:  # as in `Driver.attempt`
            raise self._driver.unknown("cuCtxPushCurrent", error) from error
        if int(result):
            failure = self._driver.error("cuCtxPushCurrent", result)
            self.note(failure)
            raise failure
        entered.append(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered = _thread.entered
        entered.pop()
        if not entered or entered[-1] is not self:
            self._pop()
        if error is not None:
            self.note(error)

    def note(self, error: BaseException | None) -> None:
        """Note an error of a call of the driver."""
        if isinstance(error, ContextLostError):
            self.is_lost = True


class _Thread(threading.local):
    """The contexts that this thread has made current in nested with-blocks, the outermost first."""

    def __init__(self) -> None:
        self.entered: list[CurrentContext] = []


_thread = _Thread()
