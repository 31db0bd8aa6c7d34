"""Calls that go on by themselves: what ``wait=False`` returns, and how to wait for several.

Theory of operation. A started call is driven by the executor's own thread, which takes no lock of the interpreter. A
`Works` keeps every work, and with it the arrays, alive until the call has ended, whether or not the program has kept
it. Callbacks run in a thread that lives as long as some are awaited, and sleeps in the executor until a call ends.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar

from unisono import log
from unisono.deadlines import Deadline, checked_timeout_s
from unisono.errors import UnisonoError, UsageError
from unisono.transports.contracts.executor import Executor, Message, Operation

_log = log.get(log.NAME)

Result = TypeVar("Result")
AnyWork = TypeVar("AnyWork", bound="Work[Any]")

# How long the thread of the callbacks sleeps at most, also where an end is awaited that does not wake it, and how long
# `wait_any` does between two looks.
_LONGEST_SLEEP_S = 1.0
_SHORT_SLEEP_S = 0.002
_LOOK_S = 0.0002
# How long closing waits for callbacks, one of which may wait for whoever closes.
_FAREWELL_S = 2.0


class Work(Generic[Result]):
    """A call that goes on by itself. Its arrays must not be changed, nor its `out` be read, until it has ended.

    Dropping it changes nothing: the call goes on. It fails if it has not ended when the `timeout_s` of the call has
    passed.
    """

    __slots__ = ("_error", "_found", "_limit_s", "_made", "_operation", "_works", "is_counted")

    def __init__(
        self,
        works: Works,
        operation: Operation | None,
        result: Any,
        limit_s: float,
        convert: Callable[[Any], Result] | None,
        found: Callable[[], Message | None] = lambda: None,
    ) -> None:
        self._works = works
        self._operation = operation  # None if there is nothing to wait for
        self._made = (result, convert)  # one attribute, for several threads may wait
        self._limit_s = limit_s
        self._found = found
        self._error: UnisonoError | None = None
        self.is_counted = True  # its end, by the executor

    def done(self) -> bool:
        """Return whether the call has ended, well or not; does not block."""
        operation = self._operation
        return operation is None or operation.ended()

    def wait(self, timeout_s: float | None = None) -> Result:
        """Wait until the call has ended and return its result, the same as without ``wait=False``.

        Args:
            timeout_s: seconds from now until the call fails, 0 or more; by default as many as the call was given.

        Raises:
            UsageError: `timeout_s` is no such number.
            MismatchError, PeerLostError, CollectiveTimeoutError, AbortedError: the call failed, on every rank; the
                contents of its output are undefined.
        """
        limit_s = self._seconds(timeout_s)
        operation = self._operation
        if operation is not None:
            try:
                operation.wait(limit_s)
            except UnisonoError as error:
                self._error = self._error or error
            self._operation = None
            self._works.drop(self)
        if self._error is not None:
            raise self._error
        made, convert = self._made
        if convert is not None:
            made = convert(made)
            self._made = (made, None)
        result: Result = made
        return result

    def _seconds(self, timeout_s: float | None) -> float:
        return self._limit_s if timeout_s is None else checked_timeout_s(timeout_s, or_zero=True)

    def result(self) -> Result:
        """Return the result of a call that has ended; raises as `wait` does.

        Raises:
            UsageError: it has not ended.
        """
        if not self.done():
            raise UsageError("the call has not ended: wait() for it")
        return self.wait()

    def synchronize(self, timeout_s: float | None = None) -> Result:
        """Wait until the result is there, for the host to read; raises as `wait` does.

        Only of calls on arrays of a device this is more than `wait`, which lets the caller's stream wait and not the
        host.
        """
        return self.wait(timeout_s)

    def message(self) -> Message | None:
        """Return which message a `recv` that has ended has got; None of any other call. Raises as `result` does.

        >>> import numpy as np, unisono as un
        >>> def ask_for_anything(world):
        ...     if world.rank > 0:
        ...         return world.send(np.full(world.rank, 0.5), 0, tag=7)
        ...     work = world.recv(np.empty(1), un.ANY_SOURCE, un.ANY_TAG, wait=False)
        ...     work.wait()
        ...     return work.message()
        >>> un.launch(ask_for_anything, 2)[0]
        Message(source=1, tag=7, dtype='float64', count=1)
        """
        self.result()
        return self._found()

    def add_done_callback(self, callback: Callable[[Work[Result]], object]) -> None:
        """Call ``callback(self)`` when the call has ended, in a thread of its own; at once, here, if it has ended.

        Callbacks of a call are called in the order in which they were added; what one raises is logged.
        """
        if not self._works.await_end(self, callback):
            call_back(callback, self)

    def __await__(self) -> Generator[Any, None, Result]:
        """Wait without blocking the event loop; the same as `wait` otherwise."""
        import asyncio  # with it comes much that those who never wait so need not load

        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def tell() -> None:
            if not ended.done():  # it may have been cancelled
                ended.set_result(None)

        def tell_loop(_: Work[Result]) -> None:
            with contextlib.suppress(RuntimeError):  # whoever cancelled may have closed the loop since
                loop.call_soon_threadsafe(tell)

        self.add_done_callback(tell_loop)
        yield from ended
        return self.wait()


class Works:
    """The works of one communicator."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._kept: dict[Work[Any], None] = {}
        self._lock = threading.Lock()  # of what follows
        self._awaited: dict[Work[Any], list[Callable[[Any], object]]] = {}
        self._thread: threading.Thread | None = None

    def add(
        self,
        operation: Operation,
        result: Any,
        limit_s: float,
        convert: Callable[[Any], Any] | None = None,
        *,
        is_counted: bool = True,
        found: Callable[[], Message | None] = lambda: None,
    ) -> Work[Any]:
        """Return the work of an operation that goes on by itself, and keep it until it has ended.

        The user gets `result`, or, where that is not yet of the user's kind, what `convert` makes of it in the end. Its
        end is one of those that `Executor.wait_for_end` counts, or else `is_counted` must be False. `found` tells of a
        receive what it has got.
        """
        work: Work[Any] = Work(self, operation, result, limit_s, convert, found)
        work.is_counted = is_counted
        return self.keep(work)

    def keep(self, work: AnyWork) -> AnyWork:
        """Keep a work until it has ended, and return it."""
        for oldest in list(itertools.islice(self._kept, 2)):
            self.drop(oldest)
            if not oldest.done():
                self._kept[oldest] = None  # to be looked at again after all others
        self._kept[work] = None
        return work

    def drop(self, work: Work[Any]) -> None:
        """Keep a work no longer."""
        self._kept.pop(work, None)

    def drop_ended(self) -> None:
        """Keep those works no longer that have ended."""
        for work in list(self._kept):
            if work.done():
                self.drop(work)

    def await_end(self, work: Work[Any], callback: Callable[[Any], object]) -> bool:
        """Have `callback` called when the work ends, and return True; return False if it has ended."""
        if work.done():  # as it is in a forked child, where another thread may have had the lock
            return False
        with self._lock:
            if work.done():
                return False
            self._awaited.setdefault(work, []).append(callback)
            if self._thread is None:
                self._thread = threading.Thread(target=self._call_back, name="unisono-callbacks", daemon=True)
                self._thread.start()
                _calling_back.add(self)
        return True

    def close(self) -> None:
        """Close the executor, which ends all calls, and wait until their callbacks have been called."""
        self._executor.close()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_FAREWELL_S)

    def is_calling_back(self) -> bool:
        """Return whether the thread of the callbacks lives in this process, which may be a forked child."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def _call_back(self) -> None:
        seen = 0
        while True:
            with self._lock:
                ended = {work: self._awaited.pop(work) for work in list(self._awaited) if work.done()}
                if not ended and not self._awaited:
                    self._thread = None
                    _calling_back.discard(self)
                    return
            for work, callbacks in ended.items():
                for callback in callbacks:
                    call_back(callback, work)
            if not ended:
                are_counted = all(work.is_counted for work in list(self._awaited))
                seen = self._executor.wait_for_end(seen, _LONGEST_SLEEP_S if are_counted else _SHORT_SLEEP_S)


# Those that have a thread of callbacks, whether or not their communicator is still there.
_calling_back: set[Works] = set()


def wait_all(works: Sequence[Work[Any]], timeout_s: float | None = None) -> list[Any]:
    """Wait until all calls have ended, and return their results, in the same order.

    Args:
        works: what calls with ``wait=False`` returned, of any communicators.
        timeout_s: seconds for all together until the first that has not ended fails; by default, each has its own.

    Raises:
        UsageError: `timeout_s` is no number of seconds, 0 or more.
        MismatchError, PeerLostError, CollectiveTimeoutError, AbortedError: one of them failed.
    """
    if timeout_s is None:
        return [work.wait() for work in works]
    deadline = Deadline(checked_timeout_s(timeout_s, or_zero=True))
    return [work.wait(deadline.left_s()) for work in works]


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


def call_back(callback: Callable[[Any], object], work: Work[Any]) -> None:
    """Call ``callback(work)``, for the work has ended; what it raises is logged."""
    try:
        callback(work)
    except Exception:  # noqa: BLE001  (the program's own, which has nobody to raise to)
        _log.exception("a callback of a call that has ended raised")


def _close_all() -> None:
    """Let no thread come back from an executor when the interpreter is about to end, for that would be a crash."""
    for works in list(_calling_back):
        if works.is_calling_back():
            works.close()


atexit.register(_close_all)
