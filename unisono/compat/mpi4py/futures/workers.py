"""`Workers`, which several executors may share, and `Share`, the tasks of one executor.

A thread of the master gives tasks to idle workers and takes outcomes. It runs while an executor is open. While tasks
run, it looks for outcomes again and again, with pauses; otherwise it waits for a task.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future
from typing import Any, NamedTuple

from unisono.compat.mpi4py.futures.tasks import Outcome, Start, Task
from unisono.compat.mpi4py.futures.worker import BACKOFF_S, pauses
from unisono.errors import UnisonoError

_numbers = itertools.count()
_open: weakref.WeakSet[Workers] = weakref.WeakSet()


class _Submitted(NamedTuple):
    """A task of a share, and its future."""

    share: Share
    future: Future[Any]
    task: Task


class Share:
    """The tasks of an executor.

    Attributes:
        queue: the tasks that no worker runs yet.
        event: set when the workers are ready, or cannot be started.
        thread: the thread that gives tasks to workers.
        broken: why no task can run; "" if tasks can.
    """

    def __init__(self, workers: Workers, initializer: Callable[..., object] | None, initargs: Any) -> None:
        self._workers = workers
        self._start = Start(next(_numbers), initializer, tuple(initargs))
        self.queue: deque[_Submitted] = deque()
        self.event = threading.Event()
        self.broken = ""
        self.is_closed = False
        self.running = 0
        self.thread = workers.add(self)

    @property
    def size(self) -> int:
        """The number of workers, when they are ready."""
        self.event.wait()
        return 0 if self.broken else self._workers.size

    def submit(self, future: Future[Any], function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Add a task.

        Raises:
            BrokenExecutor: no task can run.
        """
        with self._workers.changed:
            if self.broken:
                raise BrokenExecutor(self.broken)
            self.queue.append(_Submitted(self, future, Task(self._start, function, args, kwargs)))
            self._workers.changed.notify()

    def cancel(self) -> None:
        """Cancel the tasks that no worker runs yet."""
        with self._workers.changed:
            while self.queue:
                _, future, _ = self.queue.pop()
                future.cancel()
                future.set_running_or_notify_cancel()

    def close(self) -> None:
        """Accept no further task."""
        with self._workers.changed:
            self.is_closed = True
            self._workers.changed.notify()

    def join(self) -> None:
        """Wait until all tasks have ended, and the share is closed."""
        self._workers.join(self)

    def end(self, reason: str) -> None:
        """Let all tasks that no worker runs fail."""
        self.broken = self.broken or reason
        while self.queue:
            _, future, _ = self.queue.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(BrokenExecutor(self.broken))


class Workers:
    """Workers, with the thread that gives them tasks.

    Attributes:
        changed: notified about tasks and closed shares.
        size: the number of workers.

    Args:
        open_channel: returns the channel to the workers; the thread calls it.
        lasts: whether the workers outlive the shares; `close` ends them.
        backoff_s: the longest pause between two looks for outcomes.
    """

    def __init__(self, open_channel: Callable[[], Any], *, lasts: bool = False, backoff_s: float = BACKOFF_S) -> None:
        self.changed = threading.Condition()
        self.size = 0
        self._open_channel, self._lasts, self._backoff_s = open_channel, lasts, backoff_s
        self._channel: Any = None
        self._shares: list[Share] = []
        self._idle: deque[int] = deque()
        self._running: dict[int, _Submitted] = {}
        self._thread: threading.Thread | None = None
        self._failure = ""
        _open.add(self)

    def add(self, share: Share) -> threading.Thread:
        """Add the share of an executor, and return the thread."""
        with self.changed:
            if self._failure:
                share.end(self._failure)
                share.event.set()
            else:
                self._shares.append(share)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mpi4py.futures", daemon=True)
                self._thread.start()
            elif self._channel is not None:
                share.event.set()
            return self._thread

    def join(self, share: Share) -> None:
        """Wait until all tasks of a closed share have ended."""
        with self.changed:
            self.changed.wait_for(lambda: share not in self._shares)
            thread = None if self._shares or self._lasts else self._thread
        if thread is not None:
            thread.join()

    def close(self) -> None:
        """End the workers after their tasks."""
        with self.changed:
            for share in self._shares:
                share.is_closed = True
            self.changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()
        if self._lasts and not self._failure:
            self._lasts = False
            (self._channel or self._open_channel()).close()

    def _run(self) -> None:
        try:
            self._connect()
            while self._await_task():
                self._give_tasks()
                self._take_outcomes()
        except BaseException as error:  # noqa: BLE001 - functions of the program raise any error
            self._fail(f"the workers are lost: {type(error).__name__}: {error}")
        else:
            if not self._lasts:
                self._channel.close()

    def _connect(self) -> None:
        if self._channel is None:
            self._channel = self._open_channel()
            self.size = self._channel.size
            self._idle.extend(range(self.size))
        with self.changed:
            for share in self._shares:
                share.event.set()

    def _await_task(self) -> bool:
        """Wait until a task waits or runs; return False if all shares are closed."""
        with self.changed:
            while not self._running and not any(share.queue for share in self._shares):
                self._drop_ended_shares()
                if not self._shares:
                    self._thread = None
                    return False
                self.changed.wait()
            self._drop_ended_shares()
        return True

    def _drop_ended_shares(self) -> None:
        ended = [share for share in self._shares if share.is_closed and not share.queue and not share.running]
        for share in ended:
            self._shares.remove(share)
            share.event.set()
        if ended:
            self.changed.notify_all()

    def _give_tasks(self) -> None:
        """Give tasks to idle workers, one of each share in turn."""
        while self._idle and (submitted := self._next()) is not None:
            share, future, task = submitted
            if not future.set_running_or_notify_cancel():
                continue
            try:
                self._channel.send(self._idle[0], task)
            except UnisonoError as error:
                future.set_exception(BrokenExecutor(f"a worker is lost: {error}"))
                raise
            except Exception as error:  # noqa: BLE001 - the function or an argument cannot be pickled
                future.set_exception(error)
            else:
                self._running[self._idle.popleft()] = submitted
                share.running += 1

    def _next(self) -> _Submitted | None:
        with self.changed:
            for share in self._shares:
                try:
                    submitted = share.queue.popleft()
                except IndexError:
                    continue
                self._shares.append(self._shares.pop(self._shares.index(share)))
                return submitted
        return None

    def _take_outcomes(self) -> None:
        """Wait for an outcome, or for a task for which there is an idle worker."""
        pause = pauses(self._backoff_s)
        while self._running:
            reply = self._channel.take()
            if reply is not None:
                self._end_task(*reply)
                return
            if self._idle and any(share.queue for share in self._shares):
                return
            pause()

    def _end_task(self, worker: int, load: Callable[[], Outcome]) -> None:
        share, future, _ = self._running.pop(worker)
        self._idle.append(worker)
        share.running -= 1
        try:
            outcome = load()
        except Exception as error:  # noqa: BLE001 - the result cannot be unpickled
            outcome = Outcome(error=error)
        if outcome.broken:
            with self.changed:
                share.end(f"the worker {worker} could not start:\n{outcome.broken}")
            outcome = Outcome(error=BrokenExecutor(share.broken))
        raised = outcome.exception()
        if raised is not None:
            future.set_exception(raised)
        else:
            future.set_result(outcome.value)

    def _fail(self, reason: str) -> None:
        with self.changed:
            self._failure = reason
            for share, future, _ in self._running.values():
                share.broken = reason
                future.set_exception(BrokenExecutor(reason))
            self._running.clear()
            for share in self._shares:
                share.end(reason)
                share.event.set()
            self._shares.clear()
            self.changed.notify_all()


@atexit.register
def _end_all() -> None:
    for workers in list(_open):
        workers.close()
