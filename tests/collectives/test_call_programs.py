"""Random programs of calls on several communicators.

CallProgram are in flight together, and ranks wait for them in any order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, precondition, rule, run_state_machine_as_test
from support.collective_calls import COLLECTIVES, cases
from support.programs import by_launcher
from support.ranks import LocalRanks

import unisono as un
from unisono.testing import Again, Case, CheckError, Make, Program, Step, Together, Wait, WaitForAny, check_program
from unisono.testing.cases import MESSAGES, OBJECTS, TAGS
from unisono.testing.judges import BRIEF_S, Judges, RanksFailure, while_searching
from unisono.testing.programs import COMMUNICATORS
from unisono.testing.shrinking import shrunk_program
from unisono.testing.sources import SourceBackend, source

HANG_S = 40.0


def messages(methods: tuple[str, ...]) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        collective=st.sampled_from(methods),
        dtype=st.sampled_from(["float32", "int8", "bfloat16"]),
        root=st.integers(0, 3),
        rows=st.sampled_from([0, 1, 3, 1000, 40_000]),
        offset=st.sampled_from([0, 1]),
        shift=st.integers(0, 3),
        tag=st.sampled_from(TAGS),
        seed=st.integers(0, 3),
    )


def waiting_or_not(case: st.SearchStrategy[Case]) -> st.SearchStrategy[Case]:
    return st.builds(lambda case, wait: replace(case, wait=wait), case, st.booleans())


def possible(case: Case) -> bool:
    return case.collective != "alltoall" or case.way != "in place"


ON = st.sampled_from(list(COMMUNICATORS))
COLLECTIVE = st.sampled_from(COLLECTIVES).flatmap(cases).filter(possible)
BARRIER = st.builds(Case, st.just("barrier"), wait=st.booleans())
SEND = waiting_or_not(messages(("send",)))
GROUPED = st.one_of(COLLECTIVE, SEND, BARRIER).map(
    lambda case: replace(case, algorithm=None, way="out" if case.way == "plan" else case.way)
)


class CallProgram(RuleBasedStateMachine):
    """Makes up a program step by step. At the end, all ranks run it."""

    ranks: Any
    made = Bundle("made")
    begun = Bundle("begun")

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def take(self, step: Step) -> int:
        self.steps.append(step)
        return len(self.steps) - 1

    @rule(target=made, case=COLLECTIVE, on=ON)
    def call(self, case: Case, on: str) -> int:
        return self.take(Make(case, on))

    @rule(target=begun, case=st.one_of(COLLECTIVE, BARRIER, messages(("send",))), on=ON)
    def begin(self, case: Case, on: str) -> int:
        return self.take(Make(replace(case, wait=False), on))

    @rule(target=made, case=COLLECTIVE, on=ON, wait=st.booleans())
    def plan(self, case: Case, on: str, wait: bool) -> int:
        return self.take(Make(replace(case, way="plan", wait=wait), on))

    @rule(step=made)
    def call_again(self, step: int) -> None:
        self.take(Again(step))

    @rule(case=st.one_of(SEND, messages((*MESSAGES, *OBJECTS))), on=ON)
    def send(self, case: Case, on: str) -> None:
        self.take(Make(case, on))

    @rule(group=st.lists(GROUPED, min_size=1, max_size=4).map(tuple), on=ON)
    def group(self, group: tuple[Case, ...], on: str) -> None:
        self.take(Together(group, on))

    @rule(step=consumes(begun))
    def wait(self, step: int) -> None:
        self.take(Wait(step))

    @precondition(lambda self: self.steps)
    @rule()
    def wait_for_any(self) -> None:
        self.take(WaitForAny())

    def teardown(self) -> None:
        if self.steps:
            self.ranks.check(Program(tuple(self.steps), seed=len(self.steps)))


class Processes:
    """Ranks in processes, which run one program after the other."""

    def __init__(
        self, size: int, transport: str, backend: SourceBackend | None = None, timeout_s: float = HANG_S
    ) -> None:
        self._size, self._backend = size, backend
        self._judges = Judges(un.Options(transports=transport), backend, timeout_s)
        self.close = self._judges.close

    def check(self, program: Program) -> None:
        wrong = self.wrong(program)
        if wrong:
            is_wrong = while_searching(lambda simpler: bool(self.wrong(simpler, BRIEF_S)))
            simplest = shrunk_program(program, is_wrong)
            again = self.wrong(simplest)
            program, wrong = (simplest, again) if again else (program, wrong)
            text = source("check_program", program, self._size, backend=self._backend)
            error = CheckError(f"{wrong}\n\n{text}")
            error.program = text
            raise error

    def wrong(self, program: Program, most_s: float = HANG_S) -> str | RanksFailure:
        """Return the fault of a program; "" if it has none."""
        verdicts = self._judges.run(verdict, program, self._size, most_s)
        return verdicts if isinstance(verdicts, RanksFailure) else next(filter(None, verdicts), "")


def verdict(comm: Any, program: Program) -> str:
    """Return the fault of the program on this rank. The rank can run other programs afterwards."""
    try:
        check_program(comm, program)
    except CheckError as error:
        return error.message
    return ""


class Threads:
    """Ranks over the generic executor, with new threads for each program."""

    def __init__(self, size: int) -> None:
        self._ranks = LocalRanks(size, 8)

    def check(self, program: Program) -> None:
        self._ranks.run_calls(check_program, program)

    def close(self) -> None:
        pass


RANKS = {
    "4 ranks, shm": lambda: Processes(4, "shm"),
    "3 ranks, tcp": lambda: Processes(3, "tcp"),
    "3 ranks, generic": lambda: Threads(3),
}


@pytest.fixture(params=list(RANKS.values()), ids=list(RANKS))
def ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    started = request.param()
    yield started
    started.close()


def make_calls(ranks: Any, most: int) -> None:
    machine = type("Machine", (CallProgram,), {"ranks": ranks})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=most,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            # Hypothesis need not shrink, because our own code simplifies a failing program in less time.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_random_programs_of_concurrent_calls_give_right_results(ranks: Any) -> None:
    make_calls(ranks, 25)


def test_backend_that_confuses_calls_is_caught_with_a_short_program(tmp_path: Path) -> None:
    ranks = Processes(2, "shm", SourceBackend("support.faulty_backends", "MixesCalls"))
    with contextlib.closing(ranks), pytest.raises(CheckError, match=r"step \d: element") as raised:
        make_calls(ranks, 400)
    program = raised.value.program
    assert program is not None
    assert program.count("Make(Case(") == 2
    completed = by_launcher(program, tmp_path)
    assert completed.returncode != 0
    assert "CheckError: step" in completed.stderr


def test_hanging_backend_is_caught_with_a_short_program() -> None:
    ranks = Processes(2, "shm", SourceBackend("support.faulty_backends", "hanging_alltoall"), timeout_s=3.0)
    plain = Make(Case("allreduce", rows=3, wait=False))
    steps = (plain, Make(Case("scan"), "dup"), Make(Case("alltoall", "int8", rows=5)), Wait(0), plain, WaitForAny())
    with contextlib.closing(ranks), pytest.raises(CheckError, match="did not return in time") as raised:
        ranks.check(Program(steps))
    assert raised.value.program is not None
    assert "    Make(Case('alltoall')),\n" in raised.value.program
    assert raised.value.program.count("Make(Case(") == 1


def test_program_shrinks_to_relevant_steps_and_their_references() -> None:
    scan = Make(Case("scan", "int8", rows=5, wait=False), "dup")
    other = Make(Case("barrier"), "halves")
    program = Program((other, scan, other, WaitForAny(), scan, Again(1), other, Wait(4), Again(4)), seed=3)

    def is_wrong(program: Program) -> bool:
        """Return whether the call waits by its number for a scan that is called a second time."""
        scans = {index for index, step in enumerate(program.steps) if isinstance(step, Make) and step.on == "dup"}
        again = {step.step for step in program.steps if isinstance(step, Again)}
        return bool(scans & again & {step.step for step in program.steps if isinstance(step, Wait)})

    assert is_wrong(program)
    assert shrunk_program(program, is_wrong) == Program((scan, Wait(0), Again(0)), seed=3)
