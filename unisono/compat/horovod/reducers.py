"""`JobReducer`: averages the gradients of one optimizer or tape, step by step, among ranks some of which may join."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from unisono import Communicator, GradientReducer
from unisono.compat.horovod import job
from unisono.compat.horovod.process_sets import ProcessSet, global_process_set
from unisono.errors import UnisonoError


class JobReducer:
    """A `GradientReducer` of the job.

    The reducer is opened with the first gradient, on all ranks at the same place in the order of calls. After `elastic`
    has changed the ranks it is opened again. A rank that has joined takes part in the steps without gradients.

    Args:
        signature: a text about the gradients. The ranks of a process set match reducers of one signature by the order
            in which they create them.
        process_set: the ranks.
        op: "avg" or "sum".
        is_half: whether gradients travel as float16.

    Attributes:
        name: the name of this reducer on all ranks.
        lock: held during a step, because several threads may compute gradients.
        reducer: the reducer; None before `opened`.
        step_in_progress: the number of the step in which all ranks of the job take part now; 0 for none.
    """

    def __init__(self, signature: str, process_set: ProcessSet, op: str, *, is_half: bool) -> None:
        self.lock = threading.RLock()
        self.reducer: Any = None
        self.step_in_progress = 0
        self._process_set, self._op, self._is_half = process_set, op, is_half
        self._epoch = -1  # of the job in which the reducer was opened
        self._steps = 0  # since the reducer was opened
        self.name = job.register_optimizer(self, signature, process_set)

    def averages(self) -> bool:
        """Return whether there are other ranks with which this rank averages."""
        job.running()
        return self._process_set.included() is not False and (self._process_set.size() or 0) > 1

    def opened(self) -> GradientReducer:
        """Return the reducer, which is opened if this is the first gradient of this job."""
        if self._epoch != job.running().epoch:
            job.calls_of(self._process_set).open(self.name)
        opened: GradientReducer = self.reducer
        return opened

    @contextlib.contextmanager
    def step(self) -> Iterator[GradientReducer]:
        """Hold the lock while this rank passes the gradients of a step and waits for their averages.

        Raises:
            HorovodInternalError: a rank was lost, or ranks disagree.
        """
        with self.lock:
            try:
                opened = self.opened()
                self._steps += 1
                if self._process_set is global_process_set:  # `join` is for all ranks
                    self.step_in_progress = self._steps
                    job.running().calls.begin_step(self.name, self._steps)
                yield opened
            except UnisonoError as error:
                job.raise_explained(error)
            finally:
                self.step_in_progress = 0

    def open(self, comm: Communicator) -> None:
        """Open the reducer for these ranks, all of which do so at the same place in the order of calls."""
        # A communicator of its own, because the reducer makes further ones of it at any time.
        compression = "float16" if self._is_half else None
        self.reducer = GradientReducer(comm.dup(), op=self._op, missing="zero", compression=compression)
        self._epoch, self._steps = job.running().epoch, 0

    def catch_up(self, number: int) -> None:
        """Take part in the steps of the other ranks up to this number, without gradients: this rank has joined."""
        with self.lock:
            while self._steps < number:
                self._steps += 1
                try:
                    self.opened().finish()
                except UnisonoError as error:
                    job.raise_explained(error)
