"""`Reaper`: a thread that gives memory of one device back to the driver.

CUDA does not promise that releasing memory waits for the work that uses it. So this thread first asks whether that work
is over, again and again. A driver may wait nevertheless, for all work of the context. If that work waits for a process
that was killed, the call never returns. So no thread of the program makes such calls, and no finalizer does.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from unisono.errors import UnisonoError
from unisono.foundation import log
from unisono.foundation.deadlines import Deadline
from unisono.transports.executors.polling import pauses_of_polling

# The pause between two looks at work that is not over grows from the first value to the second.
_SHORT_LOOK_S, _LONG_LOOK_S = 0.0001, 0.01


class _Release(NamedTuple):
    """A function that releases memory, and one that returns whether it may be called."""

    release: Callable[[], object]
    may_run: Callable[[], bool]


class Reaper:
    """Runs functions that release memory, in a daemon thread."""

    def __init__(self, name: str) -> None:
        """Start the thread, called `name`."""
        # A finalizer may run while this thread is inside `put`, which a SimpleQueue allows.
        self._queue: queue.SimpleQueue[_Release | None] = queue.SimpleQueue()
        self._pending: deque[_Release] = deque()
        threading.Thread(target=_run, args=(self._queue, self._pending), name=name, daemon=True).start()

    def put(self, release: Callable[[], object], may_run: Callable[[], bool] = lambda: True) -> None:
        """Let the thread call `release` as soon as ``may_run()`` is true; never blocks, and finalizers may call it."""
        made = _Release(release, may_run)
        self._pending.append(made)
        self._queue.put(made)

    def is_idle(self) -> bool:
        """Return whether all functions have returned."""
        return not self._pending

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until all functions have returned, at most `timeout_s` seconds; return whether they have."""
        deadline = Deadline(timeout_s)
        for pause_s in pauses_of_polling():
            if self.is_idle() or deadline.has_passed():
                break
            time.sleep(pause_s or 0.0)
        return self.is_idle()

    def end(self) -> None:
        """End the thread when it has called the functions that were put so far."""
        self._queue.put(None)


def _run(functions: queue.SimpleQueue[_Release | None], pending: deque[_Release]) -> None:
    waiting: list[_Release] = []
    pauses_s, is_ended = _pauses(), False
    while waiting or not is_ended:
        try:
            new = functions.get(timeout=next(pauses_s) if waiting else None)
            pauses_s = _pauses()
        except queue.Empty:
            pass
        else:
            if new is None:
                is_ended = True
            else:
                waiting.append(new)
        waiting = [each for each in waiting if not _has_run(each, pending)]


def _pauses() -> Iterator[float]:
    pause_s = _SHORT_LOOK_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _LONG_LOOK_S)


def _has_run(each: _Release, pending: deque[_Release]) -> bool:
    """Run a function if it may; return whether it has been run."""
    try:
        if not each.may_run():
            return False
        each.release()
    except UnisonoError as error:
        log.get(log.NAME).warning("memory of a GPU was not released: %s", error)
    pending.remove(each)
    return True
