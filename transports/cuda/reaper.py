"""`Reaper`: a thread that gives memory of one device back to the driver.

The driver frees memory, unpins memory and closes memory of other processes only after all work of the context has
ended. If that work waits for a process that was killed, the call never returns. So no thread of the program makes such
calls, and no finalizer does.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from unisono import log
from unisono.deadlines import Deadline
from unisono.errors import UnisonoError
from unisono.transports.executors.polling import pauses_of_polling

Release = Callable[[], object]


class Reaper:
    """Runs functions that release memory, one after the other, in a daemon thread."""

    def __init__(self, name: str) -> None:
        """Start the thread, called `name`."""
        # A finalizer may run while this thread is inside `put`, which a SimpleQueue allows.
        self._queue: queue.SimpleQueue[Release | None] = queue.SimpleQueue()
        self._pending: deque[Release] = deque()
        threading.Thread(target=_run, args=(self._queue, self._pending), name=name, daemon=True).start()

    def put(self, release: Release) -> None:
        """Let the thread call `release`; never blocks, and finalizers may call it."""
        self._pending.append(release)
        self._queue.put(release)

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
        """Let the thread end after the functions that it has."""
        self._queue.put(None)


def _run(functions: queue.SimpleQueue[Release | None], pending: deque[Release]) -> None:
    while (release := functions.get()) is not None:
        try:
            release()
        except UnisonoError as error:
            log.get(log.NAME).warning("memory of a GPU was not released: %s", error)
        pending.popleft()
