"""Programs as data: calls on several communicators that are in flight at the same time, which all ranks run.

All ranks take the *steps* of a program in the same order. A rank may wait for a call that it has started at any later
time. So each rank waits in its own order, and ranks are at different steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from unisono.errors import NoAlgorithmError
from unisono.testing.calls import Call, prepared
from unisono.testing.cases import Case
from unisono.testing.differences import CheckError

COMMUNICATORS: dict[str, Callable[[Any], Any]] = {
    "world": lambda world: world,
    "dup": lambda world: world.dup(),
    "halves": lambda world: world.split(world.rank % 2),
    "reversed": lambda world: world.subgroup(range(world.size - 1, -1, -1)),
    "all but one": lambda world: world.split(0 if world.rank else None),
}


@dataclass(frozen=True)
class Make:
    """A call on a communicator. If its case does not wait, each rank waits at once or later, by its own choice."""

    case: Case
    on: str = "world"


@dataclass(frozen=True)
class Together:
    """The calls of a group of calls."""

    cases: tuple[Case, ...]
    on: str = "world"


@dataclass(frozen=True)
class Again:
    """Repeats the call that `Make` prepared in step `step`, which may be a persistent call."""

    step: int


@dataclass(frozen=True)
class Wait:
    """Waits for the call of step `step` if it is in flight."""

    step: int


@dataclass(frozen=True)
class WaitForAny:
    """Waits for one of the calls in flight; each rank chooses its own."""


Step = Make | Together | Again | Wait | WaitForAny


@dataclass(frozen=True)
class Program:
    """A program for all ranks.

    Attributes:
        steps: in order; `Again` and `Wait` refer to other steps by index.
        seed: the seed of each rank's own choices.
    """

    steps: tuple[Step, ...]
    seed: int = 0


def check_program(comm: Any, program: Program) -> None:
    """Run a program, and check the result of each call on this rank.

    Args:
        comm: this rank's communicator, or an object with its methods; all ranks call this with the same program.
        program: the calls.

    Raises:
        CheckError: a result is wrong, as in `check_case`; all calls have been made then.
        UnisonoError: a call raised it, which ends the program.
    """
    run = _ProgramState(comm, program.seed)
    with run.communicators:
        for index, step in enumerate(program.steps):
            run.take(index, step)
        while run.going_on:
            run.take(len(program.steps), WaitForAny())
        comm.barrier()  # because a rank that closes a communicator is lost to ranks whose calls have not ended
    if run.wrong:
        raise CheckError(run.wrong, rank=comm.rank)


class _ProgramState:
    """The state of a program on a rank.

    Attributes:
        wrong: the difference of the first wrong call, or empty.
        going_on: the calls in flight and their works, by the step that started them.
        communicators: closes the communicators that the program has created.
    """

    def __init__(self, world: Any, seed: int) -> None:
        self.wrong = ""
        self.going_on: dict[int, tuple[Call, Any]] = {}
        self.communicators = ExitStack()
        self._world = world
        self._dice = random.Random(f"{seed} {world.rank}")
        self._created: dict[str, Any] = {}
        self._calls: dict[int, tuple[Call, bool]] = {}

    def take(self, index: int, step: Step) -> None:
        """Take a step. A difference is only noted, so that the ranks stay together."""
        if isinstance(step, Make):
            self._make(index, step)
        elif isinstance(step, Together):
            self._group(index, step)
        elif isinstance(step, Again):
            self._wait(step.step)
            if step.step in self._calls:
                self._begin(step.step, *self._calls[step.step])
        elif isinstance(step, Wait):
            self._wait(step.step)
        elif self.going_on:
            self._wait(self._dice.choice(sorted(self.going_on)))

    def _communicator(self, name: str) -> Any:
        if name not in self._created:
            created = COMMUNICATORS[name](self._world)
            if created is not None and created is not self._world:
                self.communicators.enter_context(created)
            self._created[name] = created
        return self._created[name]

    def _make(self, index: int, step: Make) -> None:
        comm = self._communicator(step.on)
        if comm is None:
            return
        try:
            call = prepared(comm, step.case)
            self._begin(index, call, step.case.wait)
        except NoAlgorithmError:  # raised on all ranks, before anything is sent
            return
        self._calls[index] = call, step.case.wait

    def _begin(self, index: int, call: Call, wait: bool) -> None:
        call.prepare()
        if wait:
            self._check(index, call.difference(call.make()))
        elif self._dice.random() < 0.25:
            self._check(index, call.difference(call.make(wait=False).wait()))
        else:
            self.going_on[index] = call, call.make(wait=False)

    def _group(self, index: int, step: Together) -> None:
        comm = self._communicator(step.on)
        if comm is None:
            return
        calls = [prepared(comm, case) for case in step.cases]
        for call in calls:
            call.prepare()
        with comm.group():
            works = [call.make(wait=False) for call in calls]
        for call, work in zip(calls, works, strict=True):
            self._check(index, call.difference(work.wait()))

    def _wait(self, index: int) -> None:
        if index in self.going_on:
            call, work = self.going_on.pop(index)
            self._check(index, call.difference(work.wait()))

    def _check(self, index: int, wrong: str) -> None:
        self.wrong = self.wrong or (wrong and f"step {index}: {wrong}")
