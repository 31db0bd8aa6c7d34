"""The streams of a device double: queues of work that run as late and in as bad an order as allowed."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from unisono.testing.device_clocks import Clock

_LONGEST_LATENESS_S = 0.0005
_BLOCKED_PAUSE_S = 0.0002


@dataclass(slots=True)
class StreamWork:
    """A piece of work that was issued to a stream.

    Attributes:
        run: runs it.
        is_ready: returns whether it may run; once True, it stays True.
        touches: the base addresses of the memory that it uses.
        number: the number of pieces issued before it, on all streams.
        is_deferred: whether its clock is known only when it runs, because earlier work of the stream waits for a flag.
    """

    run: Callable[[], None]
    is_ready: Callable[[], bool]
    touches: frozenset[int]
    number: int
    is_deferred: bool


@dataclass(slots=True)
class StreamState:
    """A stream: the work that has not run yet, and the clock of its order.

    Attributes:
        stream: its number, which is unique among all processes.
        is_released: whether it has passed a flag that the host released after a failure. Then its accesses have no
            order, and the written values are undefined.
    """

    stream: int
    clock: Clock = field(default_factory=dict)
    queue: deque[StreamWork] = field(default_factory=deque)
    is_capturing: bool = False
    is_released: bool = False

    def is_deferred(self) -> bool:
        """Return whether the clock of new work is known only when the work runs."""
        return any(work.is_deferred for work in self.queue)


class StreamSchedule:
    """Runs the work of streams, one piece at a time: a seeded choice among the pieces that may run, at seeded times.

    Args:
        lock: held by every user of the streams.
        seed: the seed of all choices.
        in_order: whether work runs in the order of issue, as far as it may.
        on_trap: called with an `AssertionError` of work that this schedule's thread ran.
    """

    def __init__(
        self, lock: threading.RLock, seed: int, in_order: bool, on_trap: Callable[[AssertionError], None]
    ) -> None:
        self.streams: list[StreamState] = []
        self._random = random.Random(seed)
        self._changed = threading.Condition(lock)
        self._in_order = in_order
        self._on_trap = on_trap
        self._thread: threading.Thread | None = None
        self._is_over = False

    def start_thread(self) -> None:
        """Start a thread that runs work even if no caller asks for it."""
        self._thread = threading.Thread(target=self._run_late, name="device-double", daemon=True)
        self._thread.start()

    def issued(self) -> None:
        """Notify the thread of new work."""
        self._changed.notify_all()

    def run_some(self) -> None:
        """Run a few pieces of work, or none, because a device need not act at once."""
        for _ in range(self._random.randrange(3)):
            self.step()

    def step(self) -> bool:
        """Run one piece of work; return False if none may run."""
        heads = [stream for stream in self.streams if stream.queue and stream.queue[0].is_ready()]
        if not heads:
            return False
        first = min(heads, key=lambda stream: stream.queue[0].number)
        chosen = first if self._in_order else self._random.choice(heads)
        chosen.queue.popleft().run()
        return True

    def pending(self) -> list[StreamWork]:
        """Return the work that has not run."""
        return [work for stream in self.streams for work in stream.queue]

    def close(self) -> None:
        """Stop running work."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run_late(self) -> None:
        with self._changed:
            while not self._is_over:
                self._changed.wait_for(lambda: self._is_over or self.pending())
                # Waiting releases the lock, so that other work can be issued before this runs.
                self._changed.wait(self._random.random() ** 3 * _LONGEST_LATENESS_S)
                try:
                    if not self._is_over and not self.step():
                        self._changed.wait(_BLOCKED_PAUSE_S)
                except AssertionError as error:
                    self._on_trap(error)
