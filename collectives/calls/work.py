"""Asynchronous calls: `Work`, which ``wait=False`` returns, and the functions that wait for several works or test them.

Theory of operation
-------------------
A thread of the executor drives a started call, and takes no lock of the interpreter. The `Works` of a communicator
keeps every work, and with it the arrays, alive until the call has ended, because the program may drop the work before.
Done callbacks run in a thread of their own. That thread sleeps in the executor until a call ends, and ends itself when
no callback is pending.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, NoReturn, TypeVar

from unisono.errors import UnisonoError, UsageError
from unisono.foundation import log
from unisono.foundation.deadlines import Deadline, checked_timeout_s
from unisono.foundation.uncopyable import uncopyable
from unisono.transports.contracts.executor import ENDED, Executor, Message, Operation

_log = log.get("calls")

Result = TypeVar("Result")
AnyWork = TypeVar("AnyWork", bound="Work[Any]")

# The thread of the callbacks sleeps at most this long. The executor wakes it when a call ends.
_LONGEST_SLEEP_S = 1.0
# It sleeps at most this long if it also waits for an end that does not wake it; see `Work.is_counted`.
_SHORT_SLEEP_S = 0.002
# `wait_some` sleeps at most this long in the executor, so that Ctrl-C ends it soon.
_INTERRUPTIBLE_S = 0.05
# It sleeps this long between two checks if no executor notices all ends for which it waits.
_POLL_S = 0.0002
# `close` waits at most this long for callbacks, because a callback may itself wait for `close`.
_CLOSE_S = 2.0


@uncopyable("wait() for it, and copy its result")
class Work(Generic[Result]):
    """A started call. Do not change its arrays or read its `out` before it has ended.

    The call continues if the program drops its work. It fails if it has not ended within its `timeout_s`.

    Attributes:
        is_counted: whether `Executor.wait_for_end` returns when this call ends.
    """

    __slots__ = ("_error", "_limit_s", "_message", "_operation", "_result", "_works", "is_counted")

    def __init__(
        self,
        works: Works,
        operation: Operation | None,
        result: Any,
        limit_s: float,
        convert: Callable[[Any], Result] | None,
        message: Callable[[], Message | None] = lambda: None,
    ) -> None:
        self._works = works
        self._operation = operation  # None if there is nothing to wait for
        # One attribute holds both, because several threads may wait and each must see a pair that fits.
        self._result = (result, convert)
        self._limit_s = limit_s
        self._message = message
        self._error: UnisonoError | None = None
        self.is_counted = True

    def done(self) -> bool:
        """Return whether the call has ended, with a result or an error; does not block."""
        operation = self._operation
        return operation is None or operation.ended()

    def wait(self, timeout_s: float | None = None) -> Result:
        """Wait until the call has ended and return its result, the same as without ``wait=False``.

        Args:
            timeout_s: seconds from now until the call fails, 0 or more; by default the `timeout_s` of the call.

        Raises:
            UsageError: `timeout_s` is not a number of at least 0.
            MismatchError, PeerLostError, CollectiveTimeoutError, AbortedError: the call failed, on every rank; the
                contents of its output are undefined.
        """
        limit_s = self._limit_s if timeout_s is None else checked_timeout_s(timeout_s, or_zero=True)
        operation = self._operation
        if operation is not None:
            try:
                operation.wait(limit_s)
            except UnisonoError as error:
                self._error = self._error or error
            self._operation = None
            self._works.kept.pop(self, None)
        if self._error is not None:
            raise self._error
        value, convert = self._result
        if convert is not None:
            value = convert(value)
            self._result = (value, None)
        result: Result = value
        return result

    def _seconds(self, timeout_s: float | None) -> float:
        return self._limit_s if timeout_s is None else checked_timeout_s(timeout_s, or_zero=True)

    def result(self) -> Result:
        """Return the result of a call that has ended; raises the errors of `wait`.

        Raises:
            UsageError: the call has not ended.
        """
        if not self.done():
            raise UsageError("the call has not ended: wait() for it")
        return self.wait()

    def synchronize(self, timeout_s: float | None = None) -> Result:
        """Wait until the host may read the result; raises the errors of `wait`.

        For arrays in host memory it is the same as `wait`. For arrays on a GPU, `wait` makes only the caller's stream
        wait, and `synchronize` makes the host wait.
        """
        return self.wait(timeout_s)

    def message(self) -> Message | None:
        """Return source, tag, dtype and count of the message of a `recv` that has ended; None for other calls.

        It raises the errors of `result`.

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
        return self._message()

    def add_done_callback(self, callback: Callable[[Work[Result]], object]) -> None:
        """Call ``callback(self)`` in another thread when the call ends, or at once in this thread if it has ended.

        The callbacks of a call run in the order in which they were added. An exception of a callback is logged.
        """
        if not self._works.await_end(self, callback):
            call_back(callback, self)

    def __array__(self, *_: object, **__: object) -> NoReturn:
        """Refuse to be an array: without this, ``np.sum(work)`` would return the work itself.

        Raises:
            UsageError: always.
        """
        raise UsageError("a Work is not an array: call wait() on it, which returns the result")

    def __await__(self) -> Generator[Any, None, Result]:
        """Wait without blocking the event loop of asyncio, and return the result as `wait` does."""
        import asyncio  # a slow import, which programs without asyncio need not pay for

        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def set_ended() -> None:
            if not ended.done():  # the awaiting task may have been cancelled
                ended.set_result(None)

        def wake_loop(_: Work[Result]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may have been closed after a cancellation
                loop.call_soon_threadsafe(set_ended)

        self.add_done_callback(wake_loop)
        yield from ended
        return self.wait()


class Works:
    """The works of one communicator, which it keeps alive until their calls have ended.

    Attributes:
        kept: the works that are kept, the oldest first. A work that has been waited for removes itself.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.kept: dict[Work[Any], None] = {}
        self._lock = threading.Lock()  # protects the two attributes below
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
        message: Callable[[], Message | None] = lambda: None,
    ) -> Work[Any]:
        """Return the work of an operation that has been started, and keep it until the operation has ended.

        The work of `ENDED` is not kept. Each call drops kept works that have ended, at most two.

        Args:
            operation: the operation.
            result: the user's result; or, with `convert`, its argument.
            limit_s: the time limit of the call.
            convert: makes the user's result when the operation has ended.
            is_counted: whether `Executor.wait_for_end` returns when the operation ends.
            message: returns the message that a receive has got.
        """
        if operation is ENDED:
            if self.kept:
                self._drop_oldest()
            return Work(self, None, result, limit_s, convert, message)
        work: Work[Any] = Work(self, operation, result, limit_s, convert, message)
        work.is_counted = is_counted
        return self.keep(work)

    def keep(self, work: AnyWork) -> AnyWork:
        """Keep a work until it has ended, and return it."""
        self._drop_oldest()
        self.kept[work] = None
        return work

    def _drop_oldest(self) -> None:
        """Stop keeping the two oldest works if they have ended, so that dropped works do not pile up."""
        for oldest in list(itertools.islice(self.kept, 2)):
            self.kept.pop(oldest, None)
            if not oldest.done():
                self.kept[oldest] = None  # moves to the end, so that later calls check the others first

    def drop_ended(self) -> None:
        """Stop keeping the works whose calls have ended."""
        for work in list(self.kept):
            if work.done():
                self.kept.pop(work, None)

    def await_end(self, work: Work[Any], callback: Callable[[Any], object]) -> bool:
        """Register `callback` for the end of the call and return True; return False if the call has ended."""
        # This check is outside the lock: in a forked child all works are done, and a lost thread may hold the lock.
        if work.done():
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

    def wait_for_end(self, seen: int, most_s: float) -> int:
        """Sleep until more than `seen` counted calls have ended; see `Executor.wait_for_end`."""
        return self._executor.wait_for_end(seen, most_s)

    def close(self) -> None:
        """Close the executor, which ends all calls, and wait until their callbacks have been called."""
        self._executor.close()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_S)

    def is_calling_back(self) -> bool:
        """Return whether the thread of the callbacks runs in this process; it does not in a forked child."""
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


# The works that have a thread of callbacks, also after their communicator has been freed.
_calling_back: set[Works] = set()


def wait_all(works: Sequence[Work[Any]], timeout_s: float | None = None) -> list[Any]:
    """Wait until all calls have ended, and return their results in the same order.

    Args:
        works: works of any communicators.
        timeout_s: seconds for all calls together, after which the first call that has not ended fails. By default each
            call has its own limit.

    Raises:
        UsageError: `timeout_s` is not a number of at least 0, or `works` is a single work.
        MismatchError, PeerLostError, CollectiveTimeoutError, AbortedError: a call failed.
    """
    _check_several(works)
    if timeout_s is None:
        return [work.wait() for work in works]
    deadline = Deadline(checked_timeout_s(timeout_s, or_zero=True))
    return [work.wait(deadline.remaining_s()) for work in works]


def test_some(works: Sequence[Work[Any]]) -> list[int]:
    """Return the indices of the calls that have ended, with a result or an error, in order; does not block.

    A work stays ended, so a program that calls it again passes only the works whose results it has not handled.

    Raises:
        UsageError: `works` is a single work.
    """
    _check_several(works)
    return [index for index, work in enumerate(works) if work.done()]


def test_any(works: Sequence[Work[Any]]) -> int | None:
    """Return the lowest index of a call that has ended, with a result or an error, or None; does not block.

    Raises:
        UsageError: `works` is a single work.
    """
    _check_several(works)
    return next((index for index, work in enumerate(works) if work.done()), None)


def test_all(works: Sequence[Work[Any]]) -> bool:
    """Return whether all calls have ended, with results or errors; does not block.

    Raises:
        UsageError: `works` is a single work.
    """
    return len(test_some(works)) == len(works)


def wait_any(works: Sequence[Work[Any]]) -> int:
    """Wait until a call has ended, with a result or an error, and return its index; the lowest if several have ended.

    Raises:
        UsageError: `works` is empty, or a single work.
    """
    return wait_some(works)[0]


def wait_some(works: Sequence[Work[Any]]) -> list[int]:
    """Wait until a call has ended, and return the indices of all calls that have ended, as `test_some` does.

    Raises:
        UsageError: `works` is empty, or a single work.
    """
    _check_several(works)
    if not works:
        raise UsageError("works is empty, so no call can end: pass at least one work")
    seen = 0
    while not (ended := test_some(works)):
        seen = _seen_after_a_sleep(works, seen)
    return ended


def _seen_after_a_sleep(works: Sequence[Work[Any]], seen: int) -> int:
    """Sleep until a call may have ended; return the number of ended calls of the executor, for the next sleep."""
    first, *others = {work._works for work in works}
    if not others and all(work.is_counted for work in works):
        return first.wait_for_end(seen, _INTERRUPTIBLE_S)
    time.sleep(_POLL_S)
    return seen


def _check_several(works: Sequence[Work[Any]]) -> None:
    if isinstance(works, Work):
        raise UsageError("works is a single Work: call wait() on it, or pass a list")


def call_back(callback: Callable[[Any], object], work: Work[Any]) -> None:
    """Call ``callback(work)`` after the call has ended, and log the exception that the callback raises."""
    try:
        callback(work)
    except Exception:  # noqa: BLE001  (a callback may raise anything, and no caller could catch it)
        _log.exception("a done callback raised")


def _close_all() -> None:
    """Close before the interpreter ends, because a thread that returns from an executor after that would crash."""
    for works in list(_calling_back):
        if works.is_calling_back():
            works.close()


atexit.register(_close_all)
