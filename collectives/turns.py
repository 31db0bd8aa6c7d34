"""Jobs that are done one after the other: each by whoever waits for it, or, if nobody does, by a thread of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait

# How long closing waits for the job that is being done, which may be in a function of the user.
_FAREWELL_S = 2.0


class Turn:
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


class Turns:
    """The order of jobs, of which each begins when the one before has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of what follows
        self._last: Future[None] | None = None
        self._waiting: deque[tuple[Turn, Callable[[], None]]] = deque()
        self._thread: threading.Thread | None = None

    def are_over(self) -> bool:
        """Return whether all jobs have ended whose turns have been taken."""
        return self._last is None or self._last.done()

    def take(self) -> Turn:
        """Return the turn after all that have been taken. It must be done, here or later."""
        with self._lock:
            turn = Turn(self._last)
            self._last = turn.ended
        return turn

    def do_later(self, turn: Turn, job: Callable[[], None]) -> None:
        """Do a job when its turn has come, in a thread of these turns."""
        with self._lock:
            self._waiting.append((turn, job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._do_all, name="unisono-functions", daemon=True)
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
