"""`EventLoop`: a thread that waits for sockets and timers, and runs their callbacks. Listeners and stores use it."""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import socket
import threading
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from functools import partial
from io import FileIO

from unisono.foundation import log
from unisono.foundation.deadlines import LONGEST_WAIT_S
from unisono.foundation.forks import closed_in_child

Callback = Callable[[], None]
Timer = tuple[float, int, Callback]

_log = log.get("links")


class EventLoop:
    """One daemon thread over one selector.

    Callbacks run in that thread and must not block. If one raises, the error is logged and the loop continues. `watch`,
    `unwatch`, `call_after` and `cancel` may be called in that thread, or before `start`. `submit` and `close` may be
    called in any thread.

    Args:
        name: the name of the thread.
        on_failure: called in the thread with the error if the loop itself fails. It must notify everybody who waits for
            the loop, because the loop serves nothing after that.
    """

    def __init__(self, name: str, on_failure: Callable[[Exception], None]) -> None:
        self._on_failure = on_failure
        self._selector = closed_in_child(selectors.DefaultSelector())
        self._timers: list[Timer] = []  # in order
        self._serial = itertools.count()
        self._submitted: deque[Callback] = deque()
        try:
            wakened, waker = os.pipe()
        except OSError:
            self._selector.close()
            raise
        self._wakened, self._waker = closed_in_child(FileIO(wakened)), closed_in_child(FileIO(waker, "w"))
        os.set_blocking(waker, False)
        self.watch(self._wakened, self._drain)
        self._running = True
        self._closes_itself = False  # no other thread waits for the end of this one
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; raises RuntimeError if the system allows no more threads."""
        try:
            self._thread.start()
        except BaseException:
            self._close_descriptors()
            raise

    def watch(self, sock: socket.socket | FileIO | int, callback: Callback, *, writable: bool = False) -> None:
        """Call `callback` whenever `sock` can be read, and if `writable`, also when it can be written.

        `sock` is a socket or a descriptor. An earlier watch of it is replaced.
        """
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writable else 0)
        if sock in self._selector.get_map():
            self._selector.modify(sock, events, callback)
        else:
            self._selector.register(sock, events, callback)

    def unwatch(self, sock: socket.socket | int) -> None:
        """Stop watching `sock`; it stays open."""
        self._selector.unregister(sock)

    def call_after(self, seconds: float, callback: Callback) -> Timer:
        """Call `callback` once, after `seconds`, unless the returned timer is cancelled before."""
        timer = time.monotonic() + seconds, next(self._serial), callback
        insort(self._timers, timer)
        return timer

    def cancel(self, timer: Timer) -> None:
        """Forget a timer and its callback; do nothing if it has been called. Only callbacks call this."""
        place = bisect_left(self._timers, timer)
        if self._timers[place : place + 1] == [timer]:
            del self._timers[place]

    def submit(self, callback: Callback) -> None:
        """Call `callback` soon, in the loop's thread, unless the loop is closed. It takes no lock, for finalizers."""
        self._submitted.append(callback)
        with contextlib.suppress(OSError, ValueError):  # the loop is closed
            self._waker.write(b"\0")  # does nothing if the pipe is full, as the thread wakes up then anyway

    def fail(self, error: Exception) -> None:
        """End the loop with an error and pass it to `on_failure`. Only callbacks call this."""
        self._running = False
        self._guard(partial(self._on_failure, error))
        _log.warning("thread %s has ended: %s", self._thread.name, error)

    def is_current(self) -> bool:
        """Whether the caller is a callback of this loop."""
        return threading.current_thread() is self._thread

    def close(self, finish: Callback) -> None:
        """Call `finish` as the last callback, and end the thread.

        Another thread waits here for the end of the loop's thread. A callback cannot wait: `finish` is then called at
        once, and the thread ends when the callback has returned.
        """

        def stop() -> None:
            self._running = False
            finish()

        if self.is_current():
            self._closes_itself = True
            stop()
        else:
            self.submit(stop)
            self._thread.join()
            self._run_submitted()  # a loop that has failed has not run them
            self._close_descriptors()

    def _run(self) -> None:
        try:
            while self._running:
                for key, _ in self._selector.select(self._patience()):
                    self._guard(key.data)
                while self._timers and self._timers[0][0] <= time.monotonic():
                    self._guard(self._timers.pop(0)[2])
                self._run_submitted()
        except Exception as error:  # noqa: BLE001 - such as no memory for the selector
            _log.exception("thread %s: its event loop failed", self._thread.name)
            self.fail(error)
        if self._closes_itself:
            self._close_descriptors()

    def _run_submitted(self) -> None:
        while self._submitted:
            self._guard(self._submitted.popleft())

    def _close_descriptors(self) -> None:
        self._timers.clear()  # they refer to objects that refer to this one
        self._selector.close()
        self._waker.close()
        self._wakened.close()

    def _patience(self) -> float | None:
        if not self._timers:
            return None
        return min(max(0.0, self._timers[0][0] - time.monotonic()), LONGEST_WAIT_S)

    def _drain(self) -> None:
        self._wakened.read(4096)

    def _guard(self, callback: Callback) -> None:
        try:
            callback()
        except Exception:  # noqa: BLE001 - one faulty callback must not stop the others
            _log.exception("a callback of thread %s failed", self._thread.name)
