"""Starts the reductions of the buckets of training steps, and waits for them."""

from __future__ import annotations

from collections import deque
from functools import partial

from unisono import Communicator, UnisonoError
from unisono.frameworks.gradients.bucket_comms import cause_of
from unisono.frameworks.gradients.step_memory import StepMemory
from unisono.frameworks.gradients.timeline import now


class StepsInFlight:
    """The training steps of a reducer whose gradients the program has not yet received, and the calls that reduce them.

    Every method that waits or starts a call raises the cause if a reduction has failed: `PeerLostError`,
    `CollectiveTimeoutError` or `AbortedError`.

    Args:
        world: carries the flags of the steps.
        timeout_s: the time limit of the reduction of flags; None for that of `world`.

    Attributes:
        current: the memory of the step whose gradients are being passed; None between two steps.
        pending: the steps whose reductions have all been started, the oldest first.
    """

    def __init__(self, world: Communicator, timeout_s: float | None) -> None:
        self._world, self._timeout_s = world, timeout_s
        self.current: StepMemory | None = None
        self.pending: deque[StepMemory] = deque()

    def start_full(self, memory: StepMemory) -> None:
        """Start the buckets that are full, up to the first one in the start order that is not."""
        order = memory.start_order
        while len(memory.works) < len(order) and memory.lacking[order[len(memory.works)]] == 0:
            self.start(memory, order[len(memory.works)])

    def start(self, memory: StepMemory, index: int) -> None:
        """Start the reduction of a bucket."""
        span = memory.step.spans[index]
        span.start_s = now()
        try:
            work = memory.starts[index]()
        except UnisonoError as error:
            raise self._cause(error) from None
        memory.works[index] = work
        if memory.notes_ends:
            work.add_done_callback(lambda _: span.note_end())

    def start_rest(self, memory: StepMemory) -> None:
        """Start the buckets of a step that have not been started."""
        for index in memory.start_order[len(memory.works) :]:
            self.start(memory, index)

    def start_flags(self, memory: StepMemory) -> None:
        """Start the reduction of the flags of a step, which ends the step on this rank."""
        try:
            if memory.start_flags is None:
                again = self._world.plan(
                    "allreduce", memory.flags, op="bor", out=memory.flags, timeout_s=self._timeout_s
                )
                memory.start_flags = partial(again, wait=False)
            memory.flags_work = memory.start_flags()
        except UnisonoError as error:
            raise self._cause(error) from None

    def wait_for_flags(self, memory: StepMemory) -> None:
        """Wait until the flags of all ranks have been joined."""
        assert memory.flags_work is not None
        try:
            memory.flags_work.wait()
        except UnisonoError as error:
            raise self._cause(error) from None

    def wait_for_bucket(self, memory: StepMemory, index: int) -> None:
        """Wait for the reduction of a bucket."""
        try:
            memory.wait(index)
        except UnisonoError as error:
            raise self._cause(error) from None

    def wait(self, memory: StepMemory) -> None:
        """Wait for all reductions of a step."""
        try:
            for index in memory.works:  # empty in a step that `load_state_dict` has restored
                if index not in memory.ended:
                    memory.wait(index)
            if memory.flags_work is not None:
                memory.flags_work.wait()
        except UnisonoError as error:
            raise self._cause(error) from None

    def _cause(self, error: UnisonoError) -> UnisonoError:
        """Return the error that made the communicators fail, if `error` only says that they have failed."""
        memories = [*self.pending, *([self.current] if self.current else [])]
        return cause_of(error, [work for memory in memories for work in memory.started()])
