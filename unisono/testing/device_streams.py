"""The streams of a device double: queues of work, and who carries it out, as late and in as bad an order as allowed."""

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
class Work:
    """One thing that was issued to a stream.

    Attributes:
        run: carries it out.
        is_ready: whether it may run; what it says may become true only.
        touches: the base addresses of the memory that it uses.
        number: how many were issued before it, on all streams.
    """

    run: Callable[[], None]
    is_ready: Callable[[], bool]
    touches: frozenset[int]
    number: int


@dataclass(slots=True)
class StreamState:
    """A stream: what was issued to it and has not run, and what it is ordered behind.

    Attributes:
        stream: its number, of which there is no other in any process.
    """

    stream: int
    clock: Clock = field(default_factory=dict)
    queue: deque[Work] = field(default_factory=deque)
    is_capturing: bool = False


class Schedule:
    """Runs the work of streams, one piece at a time: a seeded choice of those that may run, at seeded times.

    Args:
        lock: held by whoever uses the streams.
        seed: of all choices.
        in_order: whether work runs in the order in which it was issued, as far as it may.
        on_trap: told of an `AssertionError` of work that the thread of this schedule ran.
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
        """Let work run also while nobody asks for it."""
        self._thread = threading.Thread(target=self._run_late, name="device-double", daemon=True)
        self._thread.start()

    def issued(self) -> None:
        """Take note of new work."""
        self._changed.notify_all()

    def run_some(self) -> None:
        """Run nothing, or a little, of what may run: what is asked for is not done at once."""
        for _ in range(self._random.randrange(3)):
            self.step()

    def step(self) -> bool:
        """Run one piece of work; return whether there was one that may run."""
        heads = [stream for stream in self.streams if stream.queue and stream.queue[0].is_ready()]
        if not heads:
            return False
        first = min(heads, key=lambda stream: stream.queue[0].number)
        chosen = first if self._in_order else self._random.choice(heads)
        chosen.queue.popleft().run()
        return True

    def pending(self) -> list[Work]:
        """Return what was issued and has not run."""
        return [work for stream in self.streams for work in stream.queue]

    def close(self) -> None:
        """Run nothing more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run_late(self) -> None:
        with self._changed:
            while not self._is_over:
                self._changed.wait_for(lambda: self._is_over or self.pending())
                # The lock is not held meanwhile: other things are issued before this runs.
                self._changed.wait(self._random.random() ** 3 * _LONGEST_LATENESS_S)
                try:
                    if not self._is_over and not self.step():
                        self._changed.wait(_BLOCKED_PAUSE_S)
                except AssertionError as error:
                    self._on_trap(error)
