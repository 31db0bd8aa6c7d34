"""Calls that go on by themselves: what ``wait=False`` returns, and how to wait for several.

Theory of operation. A started call is driven by the executor's own thread, which takes no lock of the interpreter. A
`Works` keeps every work, and with it the arrays, alive until the call has ended, whether or not the program has kept
it. Callbacks run in a thread that lives as long as some are awaited, and sleeps in the executor until a call ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar

from unisono.errors import UnisonoError, UsageError
from unisono.transports.base import Executor, Operation

_log = logging.getLogger("unisono")

Result = TypeVar("Result")

# How long the thread of the callbacks sleeps at most, and how long `wait_any` does between two looks.
_LONGEST_SLEEP_S = 1.0
_LOOK_S = 0.0002


class Work(Generic[Result]):
    """A call that goes on by itself. Its arrays must not be changed, nor its `out` be read, until it has ended.

    Dropping it changes nothing: the call goes on. It fails if it has not ended when the `timeout_s` of the call has
    passed.
    """

    __slots__ = ("_convert", "_error", "_limit_s", "_operation", "_result", "_works")

    def __init__(
        self,
        works: Works,
        operation: Operation | None,
        result: Any,
        limit_s: float,
        convert: Callable[[Any], Result] | None,
    ) -> None:
        self._works = works
        self._operation = operation  # None if there is nothing to wait for
        self._result = result
        self._limit_s = limit_s
        self._error: UnisonoError | None = None
        self._convert = convert

    def done(self) -> bool:
        """Return whether the call has ended, well or not; does not block."""
        operation = self._operation
        return operation is None or operation.ended()

    def wait(self, timeout_s: float | None = None) -> Result:
        """Wait until the call has ended and return its result, the same as without ``wait=False``.

        Args:
            timeout_s: seconds from now until the call fails; by default as many as the call was given.

        Raises:
            MismatchError, PeerLostError, CollectiveTimeoutError, AbortedError: the call failed, on every rank; the
                contents of its output are undefined.
        """
        operation = self._operation
        if operation is not None:
            try:
                operation.wait(self._limit_s if timeout_s is None else timeout_s)
            except UnisonoError as error:
                self._error = self._error or error
            self._operation = None
            self._works.drop(self)
        if self._error is not None:
            raise self._error
        if self._convert is not None:
            self._result, self._convert = self._convert(self._result), None
        result: Result = self._result
        return result

    def result(self) -> Result:
        """Return the result of a call that has ended; raises as `wait` does.

        Raises:
            UsageError: it has not ended.
        """
        if not self.done():
            raise UsageError("the call has not ended: wait() for it")
        return self.wait()

    def add_done_callback(self, callback: Callable[[Work[Result]], object]) -> None:
        """Call ``callback(self)`` when the call has ended, in a thread of its own; at once, here, if it has ended.

        Callbacks are called in the order in which they were added; what one raises is logged.
        """
        if not self._works.await_end(self, callback):
            _call(callback, self)

    def __await__(self) -> Generator[Any, None, Result]:
        """Wait without blocking the event loop; the same as `wait` otherwise."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def tell() -> None:
            if not ended.done():  # it may have been cancelled
                ended.set_result(None)

        self.add_done_callback(lambda _: loop.call_soon_threadsafe(tell))
        yield from ended
        return self.wait()


class Works:
    """The works of one communicator."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._kept: dict[Work[Any], None] = {}
        self._lock = threading.Lock()  # of what follows
        self._awaited: list[tuple[Work[Any], Callable[[Any], object]]] = []
        self._thread: threading.Thread | None = None

    def add(
        self, operation: Operation, result: Any, limit_s: float, convert: Callable[[Any], Any] | None = None
    ) -> Work[Any]:
        """Return the work of an operation that goes on by itself, and keep it until it has ended.

        The user gets `result`, or, where that is not yet of the user's kind, what `convert` makes of it in the end.
        """
        for oldest in list(itertools.islice(self._kept, 2)):
            self.drop(oldest)
            if not oldest.done():
                self._kept[oldest] = None  # to be looked at again after all others
        work: Work[Any] = Work(self, operation, result, limit_s, convert)
        self._kept[work] = None
        return work

    def drop(self, work: Work[Any]) -> None:
        """Keep a work no longer."""
        self._kept.pop(work, None)

    def await_end(self, work: Work[Any], callback: Callable[[Any], object]) -> bool:
        """Have `callback` called when the work ends, and return True; return False if it has ended."""
        with self._lock:
            if work.done():
                return False
            self._awaited.append((work, callback))
            if self._thread is None:
                self._thread = threading.Thread(target=self._call_back, name="unisono-callbacks", daemon=True)
                self._thread.start()
        return True

    def _call_back(self) -> None:
        seen = 0
        while True:
            with self._lock:
                ended = [each for each in self._awaited if each[0].done()]
                self._awaited = [each for each in self._awaited if each not in ended]
                if not ended and not self._awaited:
                    self._thread = None
                    return
            for work, callback in ended:
                _call(callback, work)
            if not ended:
                seen = self._executor.wait_for_end(seen, _LONGEST_SLEEP_S)


def wait_all(works: Sequence[Work[Any]], timeout_s: float | None = None) -> list[Any]:
    """Wait until all calls have ended, and return their results, in the same order.

    Args:
        works: what calls with ``wait=False`` returned, of any communicators.
        timeout_s: seconds for all together until the first that has not ended fails; by default, each has its own.

    Raises:
        MismatchError, PeerLostError, CollectiveTimeoutError, AbortedError: one of them failed.
    """
    if timeout_s is None:
        return [work.wait() for work in works]
    deadline = time.monotonic() + timeout_s
    return [work.wait(max(0.0, deadline - time.monotonic())) for work in works]


def wait_any(works: Sequence[Work[Any]]) -> int:
    """Wait until one of the calls has ended, well or not, and return its index; that of the first, if several have.

    Raises:
        UsageError: there are none.
    """
    if not works:
        raise UsageError("there is nothing to wait for")
    while True:
        for index, work in enumerate(works):
            if work.done():
                return index
        time.sleep(_LOOK_S)


def _call(callback: Callable[[Any], object], work: Work[Any]) -> None:
    try:
        callback(work)
    except Exception:  # noqa: BLE001  (the program's own, which has nobody to raise to)
        _log.exception("a callback of a call that has ended raised")
