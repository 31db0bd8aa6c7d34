"""`SerialQueue` runs jobs one after the other, each in the thread that waits for it or in a thread of the queue.

Used by: the reducer for custom ops, and calls on a GPU. Both must run their jobs in the same order on all ranks. A
thread pool would not do, because it runs a job in another thread even if the caller waits for it at once.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from unisono.deadlines import Deadline
from unisono.errors import CollectiveTimeoutError, UsageError
from unisono.transports.contracts.executor import Executor

# `close` waits at most this long for a running job, because the job may be in a Python function of the user.
_CLOSE_S = 2.0


class Ticket:
    """The position of a job in a `SerialQueue`.

    Attributes:
        ended: is done when the job has ended, and holds the exception that the job raised.
    """

    def __init__(self, before: Future[None] | None) -> None:
        self.ended: Future[None] = Future()
        self._before = before

    def do(self, job: Callable[[], None]) -> None:
        """Wait until all earlier jobs have ended, and run this job; its exception goes to `ended`."""
        try:
            if self._before is not None and not self._before.done():
                wait([self._before])
            self._before = None  # would keep the exception of that job alive
            job()
        except BaseException as error:  # noqa: BLE001  (the thread that waits for the job raises it)
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)


class SerialQueue:
    """A queue of jobs, each of which starts when the job before it has ended. It may be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects the attributes below
        self._last: Future[None] | None = None
        self._waiting: deque[tuple[Ticket, Callable[[], None]]] = deque()
        self._thread: threading.Thread | None = None

    def are_over(self) -> bool:
        """Return whether the jobs of all tickets have ended."""
        return self._last is None or self._last.done()

    def take(self) -> Ticket:
        """Return the next ticket; without `Ticket.do` or `do_later` for it, no later job starts."""
        with self._lock:
            ticket = Ticket(self._last)
            self._last = ticket.ended
        return ticket

    def do_later(self, ticket: Ticket, job: Callable[[], None]) -> None:
        """Run the job of a ticket in the thread of this queue, when all earlier jobs have ended."""
        with self._lock:
            self._waiting.append((ticket, job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._do_all, name="unisono-turns", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Wait until the jobs have ended, for at most 2 seconds; the caller has made them fail before."""
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
    """A job of a `SerialQueue` with the interface of `Operation`, so that a `Work` can wait for it.

    Args:
        executor: the executor of the communicator, which is aborted if the job takes too long.
        ended: the future of the job's ticket.
        operation: the name of the call in errors.
    """

    def __init__(self, executor: Executor, ended: Future[Any], operation: str) -> None:
        self._executor = executor
        self._ended = ended
        self._operation = operation
        self._process = os.getpid()  # a forked child has no thread that would run the job

    def poll(self) -> bool:
        if self.ended():
            self._result()
        return self.ended()

    def wait(self, timeout_s: float) -> None:
        try:
            deadline = Deadline(timeout_s)
            while not (self.ended() or deadline.has_passed()):
                wait([self._ended], deadline.left_s())
        except KeyboardInterrupt:
            self.abort("interrupted")
            raise
        if not self.ended():
            me = self._executor.rank
            text = f"rank {self._executor.members[me]} waited {timeout_s:g} s for the end of {self._operation}"
            self.abort(text)
            raise CollectiveTimeoutError(text, rank=me, operation=self._operation)
        self._result()

    def go_on(self, timeout_s: float) -> None:
        """Do nothing: the job goes on by itself from its start, with the time limit that it got then."""

    def ended(self) -> bool:
        return self._ended.done() or os.getpid() != self._process

    def abort(self, reason: str) -> None:
        self._executor.abort(reason)

    def _result(self) -> None:
        if not self._ended.done():
            raise UsageError(
                "this process was forked from a rank, and the call goes on only in the rank", operation=self._operation
            )
        self._ended.result()
