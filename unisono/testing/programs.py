"""Calls on several communicators, in flight at the same time, as data: programs that all ranks run.

A program has *steps*, which all ranks take in the same order. What a rank has started it may wait for at any time,
so that each rank waits in an order of its own, and ranks are at different steps.
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
    """A call on a communicator. If its case does not wait, a rank waits at once or later, as it likes."""

    case: Case
    on: str = "world"


@dataclass(frozen=True)
class Together:
    """The calls of a group."""

    cases: tuple[Case, ...]
    on: str = "world"


@dataclass(frozen=True)
class Again:
    """Another call by what `Make` has prepared in step `step`, which may be a plan."""

    step: int


@dataclass(frozen=True)
class Wait:
    """The end of what goes on since step `step`, if anything does."""

    step: int


@dataclass(frozen=True)
class WaitForAny:
    """The end of one of the calls that go on: each rank takes another."""


Step = Make | Together | Again | Wait | WaitForAny


@dataclass(frozen=True)
class Program:
    """What ranks do.

    Attributes:
        steps: in their order; `Again` and `Wait` name others by their index.
        seed: of what each rank decides by itself.
    """

    steps: tuple[Step, ...]
    seed: int = 0


def check_program(comm: Any, program: Program) -> None:
    """Run a program, and check what comes of each call on this rank.

    Args:
        comm: this rank's communicator, or what has its methods; all ranks call this with the same program.
        program: the calls.

    Raises:
        CheckError: as `check_case` does; all calls have been made then.
        UnisonoError: what a call raises, which ends the program.
    """
    run = _Run(comm, program.seed)
    with run.communicators:
        for index, step in enumerate(program.steps):
            run.take(index, step)
        while run.going_on:
            run.take(len(program.steps), WaitForAny())
        comm.barrier()  # who closes a communicator is lost to ranks whose calls have not ended
    if run.wrong:
        raise CheckError(run.wrong, rank=comm.rank)


class _Run:
    """A program as far as it has come on a rank.

    Attributes:
        wrong: what the first call that was wrong got.
        going_on: by the step that began them, the calls that have not been waited for, and their works.
        communicators: closes those that have been made.
    """

    def __init__(self, world: Any, seed: int) -> None:
        self.wrong = ""
        self.going_on: dict[int, tuple[Call, Any]] = {}
        self.communicators = ExitStack()
        self._world = world
        self._dice = random.Random(f"{seed} {world.rank}")
        self._made: dict[str, Any] = {}
        self._calls: dict[int, tuple[Call, bool]] = {}

    def take(self, index: int, step: Step) -> None:
        """Take a step; what is wrong is kept, so that the ranks stay together."""
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
        if name not in self._made:
            made = COMMUNICATORS[name](self._world)
            if made is not None and made is not self._world:
                self.communicators.enter_context(made)
            self._made[name] = made
        return self._made[name]

    def _make(self, index: int, step: Make) -> None:
        comm = self._communicator(step.on)
        if comm is None:
            return
        try:
            call = prepared(comm, step.case)
            self._begin(index, call, step.case.wait)
        except NoAlgorithmError:  # on all ranks alike, before anything is sent
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
