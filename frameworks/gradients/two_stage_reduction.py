"""Reductions of several collectives, each of which is started when the one before has ended.

Theory of operation. A rank may find late that a collective has ended, or only then that two have; but all ranks must
start those of a communicator in the same order. So the first collectives of all chains of a lane go over one
communicator, in the order in which the chains are started, and the second ones over another, in the same order: a chain
waits behind those before it. Whoever comes by starts what can be: the thread of the callbacks, or one that waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from unisono import UnisonoError
from unisono.frameworks.gradients.compression import Stages


class Pending(Protocol):
    """A reduction that goes on; `unisono.Work` is one."""

    def done(self) -> bool:
        """Return whether it has ended."""

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait until it has ended; raises its error."""

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback(…)`` when it has ended, in whatever thread."""


class Chains:
    """The chains of one lane."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._going_on: deque[Chain] = deque()

    def start(self, stages: Stages) -> Chain:
        """Start the first collective of a chain; the other follows. To be called by one thread at a time."""
        chain = Chain(stages, self)
        if len(stages.starts) > 1:
            self._going_on.append(chain)
            chain.work.add_done_callback(lambda _: self.go_on())
        return chain

    def go_on(self) -> None:
        """Start what can be started."""
        with self._lock:
            while self._going_on and self._going_on[0].work.done():
                self._going_on.popleft().go_on()

    def call_back(self, chain: Chain, callback: Callable[[Any], object]) -> None:
        """Have something called when a chain ends."""
        with self._lock:
            if chain in self._going_on:
                chain.callbacks.append(callback)
                return
        chain.work.add_done_callback(callback)


class Chain:
    """A reduction in one or two stages: a `Pending`. It is finished by the first thread that waits for it.

    Attributes:
        work: the collective that goes on.
        callbacks: what is to be called when the last one has ended.
    """

    def __init__(self, stages: Stages, chains: Chains) -> None:
        self._stages, self._chains = stages, chains
        self._error: UnisonoError | None = None
        self._is_finished = False
        self.callbacks: list[Callable[[Any], object]] = []
        self.work = stages.starts[0]()

    def go_on(self) -> None:
        """Start the second collective."""
        try:
            self.work = self._stages.starts[1]()
        except UnisonoError as error:  # it is raised to whoever waits
            self._error = error
        for callback in self.callbacks:
            self.work.add_done_callback(callback)

    def done(self) -> bool:
        """Return whether it has ended."""
        self._chains.go_on()
        return self.work.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended; raises its error."""
        self.work.wait(timeout_s)
        self._chains.go_on()
        if self._error is not None:
            raise self._error
        self.work.wait(timeout_s)
        if not self._is_finished:
            self._is_finished = True
            self._stages.finish()

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback(…)`` when it has ended, in whatever thread."""
        self._chains.call_back(self, callback)
