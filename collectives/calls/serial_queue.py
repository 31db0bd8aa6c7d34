"""Jobs that are done one after the other: each by whoever waits for it, or, if nobody does, by a thread of its own."""

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

# How long closing waits for the job that is being done, which may be in a function of the user.
_FAREWELL_S = 2.0


class Ticket:
    """The place of a job in the order; `ended` is done when it has ended, and has what it raised."""

    def __init__(self, before: Future[None] | None) -> None:
        self.ended: Future[None] = Future()
        self._before = before

    def do(self, job: Callable[[], None]) -> None:
        """Wait until all jobs before have ended, and do this one; raises nothing but what interrupts that wait."""
        try:
            if self._before is not None and not self._before.done():
                wait([self._before])
            self._before = None  # which would keep what it raised
            job()
        except BaseException as error:  # noqa: BLE001  (whoever waits for the job gets it)
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)


class SerialQueue:
    """The order of jobs, of which each begins when the one before has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of what follows
        self._last: Future[None] | None = None
        self._waiting: deque[tuple[Ticket, Callable[[], None]]] = deque()
        self._thread: threading.Thread | None = None

    def are_over(self) -> bool:
        """Return whether all jobs have ended whose turns have been taken."""
        return self._last is None or self._last.done()

    def take(self) -> Ticket:
        """Return the turn after all that have been taken. It must be done, here or later."""
        with self._lock:
            turn = Ticket(self._last)
            self._last = turn.ended
        return turn

    def do_later(self, turn: Ticket, job: Callable[[], None]) -> None:
        """Do a job when its turn has come, in a thread of these turns."""
        with self._lock:
            self._waiting.append((turn, job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._do_all, name="unisono-turns", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Wait until the jobs have ended, which must be about to fail, but no longer than seconds."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_FAREWELL_S)

    def _do_all(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                turn, job = self._waiting.popleft()
            turn.do(job)


class TurnOperation:
    """A call that is done in its turn, as an operation of an executor."""

    def __init__(self, executor: Executor, future: Future[Any], operation: str) -> None:
        self._executor = executor
        self._future = future
        self._operation = operation
        self._process = os.getpid()  # a child that is forked from it has no thread that would go on

    def poll(self) -> bool:
        """See `Operation.poll`."""
        if self.ended():
            self._result()
        return self.ended()

    def wait(self, timeout_s: float) -> None:
        """See `Operation.wait`."""
        try:
            deadline = Deadline(timeout_s)
            while not (self.ended() or deadline.has_passed()):
                wait([self._future], deadline.left_s())
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
        """See `Operation.go_on`; it does so from its start, with the limit that it was given then."""

    def ended(self) -> bool:
        """See `Operation.ended`."""
        return self._future.done() or os.getpid() != self._process

    def abort(self, reason: str) -> None:
        """See `Operation.abort`."""
        self._executor.abort(reason)

    def _result(self) -> None:
        if not self._future.done():
            raise UsageError("this process was forked from a rank", operation=self._operation)
        self._future.result()
