"""Reductions of two collectives: the second starts when the first has ended. Compression in blocks needs them.

Theory of operation
-------------------
All ranks must start the collectives of a communicator in the same order, but each rank notices at its own time that a
first stage has ended. So a bucket communicator has two communicators and one queue. The first stages of all reductions
go over one communicator, in the order in which the reductions are started. The second stages go over the other one in
the same order: each reduction waits in the queue until those before it have started their second stage. Any thread may
start the second stages that are due: the thread that runs callbacks, or one that waits for a reduction.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from unisono import UnisonoError
from unisono.frameworks.gradients.stages import Stages


class ReductionQueue:
    """The reductions of one bucket communicator that have not started their second stage, the oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[TwoStageReduction] = deque()

    def start(self, stages: Stages) -> TwoStageReduction:
        """Start a reduction. Its second stage starts by itself. Only one thread at a time may call this method."""
        reduction = TwoStageReduction(stages, self)
        if len(stages.starts) > 1:
            self._waiting.append(reduction)
            reduction.work.add_done_callback(lambda _: self.start_due())
        return reduction

    def start_due(self) -> None:
        """Start the second stage of each reduction whose first stage has ended, in the order of the queue."""
        with self._lock:
            while self._waiting and self._waiting[0].work.done():
                self._waiting.popleft().start_second_stage()

    def call_back(self, reduction: TwoStageReduction, callback: Callable[[Any], object]) -> None:
        """Call `callback` when the last stage of a reduction ends."""
        with self._lock:
            if reduction in self._waiting:
                reduction.callbacks.append(callback)
                return
        reduction.work.add_done_callback(callback)


class TwoStageReduction:
    """A reduction in one or two stages, which is a `Pending`. The first thread that waits for it writes the result.

    Attributes:
        work: the collective in flight.
        callbacks: the functions to call when the second stage ends; they are kept here until it starts.
    """

    def __init__(self, stages: Stages, queue: ReductionQueue) -> None:
        self._stages, self._queue = stages, queue
        self._error: UnisonoError | None = None
        self._is_finished = False
        self.callbacks: list[Callable[[Any], object]] = []
        self.work = stages.starts[0]()

    def start_second_stage(self) -> None:
        """Start the second collective of the reduction. If it cannot be started, `wait` raises the error."""
        try:
            self.work = self._stages.starts[1]()
        except UnisonoError as error:
            self._error = error
        for callback in self.callbacks:
            self.work.add_done_callback(callback)

    def done(self) -> bool:
        self._queue.start_due()
        return self.work.done()

    def wait(self, timeout_s: float | None = None) -> None:
        self.work.wait(timeout_s)
        self._queue.start_due()
        if self._error is not None:
            raise self._error
        self.work.wait(timeout_s)
        if not self._is_finished:
            self._is_finished = True
            self._stages.finish()

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._queue.call_back(self, callback)
