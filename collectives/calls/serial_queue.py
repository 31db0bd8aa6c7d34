"""`SerialQueue` runs functions one after the other, each in the caller's thread or in a thread of the queue.

A caller first takes a *ticket*, which fixes the position of its function in the queue. Then it passes the function
itself: to `QueueTicket.do`, which runs the function in this thread, or to `do_later`, for a thread of the queue.

Used by: the reducer for custom ops, the verifier of results, and calls on a GPU. All must run their functions in
the same order on all ranks. A thread pool would not do, because it runs a function in another thread even if the caller
waits for the end at once.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

from unisono.errors import CollectiveTimeoutError, UnisonoError, UsageError
from unisono.foundation.deadlines import Deadline
from unisono.transports.contracts.executor import Executor

# `close` waits at most this long for the running function, because that may have called a function of the user.
_CLOSE_S = 2.0


@contextmanager
def aborting_if_interrupted(executor: Executor) -> Iterator[None]:
    """Abort the communicator if the block is interrupted, because other ranks then wait for its next exchange."""
    try:
        yield
    except UnisonoError:
        raise
    except BaseException as error:
        executor.abort("interrupted" if isinstance(error, KeyboardInterrupt) else f"interrupted by {error!r}")
        raise


class QueueTicket:
    """The position of one function in a `SerialQueue`.

    Attributes:
        ended: a future that is done when the function has ended. It holds the exception that the function raised.
    """

    def __init__(self, before: Future[None] | None) -> None:
        self.ended: Future[None] = Future()
        self._before = before

    def do(self, job: Callable[[], None]) -> None:
        """Wait until the functions of all earlier tickets have ended, and run `job`. Its exception goes to `ended`."""
        try:
            if self._before is not None and not self._before.done():
                wait([self._before])
            self._before = None  # would keep the exception of that function alive
            job()
        except BaseException as error:  # noqa: BLE001  (the thread that waits for `ended` raises it)
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)


class SerialQueue:
    """A queue of functions, each of which starts when the one before it has ended. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects the attributes below
        self._last: Future[None] | None = None
        self._waiting: deque[tuple[QueueTicket, Callable[[], None]]] = deque()
        self._thread: threading.Thread | None = None

    def are_over(self) -> bool:
        """Return whether all functions that have a ticket have ended."""
        return self._last is None or self._last.done()

    def take(self) -> QueueTicket:
        """Return the next ticket. The caller must pass it a function, because the functions of later tickets wait."""
        with self._lock:
            ticket = QueueTicket(self._last)
            self._last = ticket.ended
        return ticket

    def do_later(self, ticket: QueueTicket, job: Callable[[], None]) -> None:
        """Let the thread of this queue run `job` as the function of `ticket`, when all earlier tickets have ended."""
        with self._lock:
            self._waiting.append((ticket, job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._do_all, name="unisono-turns", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Wait at most 2 seconds for the functions to end. The caller must have aborted their communicator before."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_S)

    def _do_all(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                ticket, job = self._waiting.popleft()
            ticket.do(job)


class QueuedOperation:
    """A function in a `SerialQueue` with the interface of `Operation`, so that a `Work` can wait for its end.

    Args:
        executor: the executor of the communicator, which is aborted if the function takes too long.
        ended: the future of the function's ticket.
        operation: the name of the call in errors.
    """

    def __init__(self, executor: Executor, ended: Future[Any], operation: str) -> None:
        self._executor = executor
        self._ended = ended
        self._operation = operation
        self._process = os.getpid()  # a forked child has no thread that would run the function

    def poll(self) -> bool:
        if self.ended():
            self._result()
        return self.ended()

    def wait(self, timeout_s: float) -> None:
        if not self._ended.done():  # a call that waits at once has already run its function in this thread
            self._await(timeout_s)
        self._result()

    def _await(self, timeout_s: float) -> None:
        try:
            deadline = Deadline(timeout_s)
            while not (self.ended() or deadline.has_passed()):
                wait([self._ended], deadline.remaining_s())
        except KeyboardInterrupt:
            self.abort("interrupted")
            raise
        if not self.ended():
            me = self._executor.rank
            text = f"rank {self._executor.members[me]} waited {timeout_s:g} s for the end of {self._operation}"
            self.abort(text)
            raise CollectiveTimeoutError(text, rank=me, operation=self._operation)

    def run_in_background(self, timeout_s: float) -> None:
        """Do nothing: a thread runs the queued function, whose time limit was set when it was queued."""

    def ended(self) -> bool:
        return self._ended.done() or os.getpid() != self._process

    def abort(self, reason: str) -> None:
        self._executor.abort(reason)

    def _result(self) -> None:
        if not self._ended.done():
            raise UsageError(
                "this process was forked from a rank, and only the rank continues the call", operation=self._operation
            )
        self._ended.result()
