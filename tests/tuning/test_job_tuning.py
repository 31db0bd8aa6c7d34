"""The decisions of a job that tries algorithms in its calls: the budget, the rivals, and the measurements."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings, strategies as st

from unisono.tuning.decide.choice import NO_STATE, Question, choose
from unisono.tuning.decide.table import REACH, compiled
from unisono.tuning.measure.job_tuning import (
    BUDGET,
    FEWEST_TRIALS,
    FIRST,
    IDLE,
    MOST_TRIALS,
    Facts,
    JobTuning,
    agreed_facts,
    facts_of_rank,
    rivals,
)
from unisono.tuning.measure.measurement_log import Measurement, line_of, read_line

bounded = settings(max_examples=60, deadline=None, derandomize=True)
ASKED = Question("allreduce", 1 << 16, 4, "shm", hosts=((0, 1, 2, 3),))
CHAMPION = choose(ASKED).variant
RIVALS = tuple(rivals(ASKED, CHAMPION, NO_STATE))
ABOUT = {"machine": "here", "trial": True}


class Job:
    """A job of equal calls that takes simulated times.

    Args:
        factors: the time of each rival divided by that of the champion, which is `usual_ns`; by default 1.
        noise: by how much the time of a call varies.
    """

    def __init__(self, factors: Mapping[str, float], usual_ns: int, around_ns: int, noise: float, seed: int) -> None:
        self.tuning = JobTuning()
        self._factors, self._usual_ns, self._around_ns, self._noise = factors, usual_ns, around_ns, noise
        self._draw = random.Random(seed)
        self.calls_ns = 0
        self.extra_ns = 0.0
        self.turns: list[str | None] = []

    def run(self, calls: int) -> None:
        while calls > 0:
            calls -= self.tuning.pause + 1
            self.calls_ns += self.tuning.pause * self._usual_ns
            if self.tuning.is_new(ASKED):
                self.tuning.open(ASKED, CHAMPION, NO_STATE)
            rival = self.tuning.trial(ASKED)
            usual_ns = self._usual_ns * (1 + self._noise * self._draw.random())
            call_ns = round(usual_ns * (self._factors.get(rival, 1.0) if rival else 1.0))
            self.calls_ns += call_ns
            self.extra_ns += max(0, call_ns - self._usual_ns) * (rival is not None) + self._around_ns
            self.turns.append(rival)
            self.tuning.note(ASKED, rival, Facts(call_ns, self._around_ns, self.calls_ns))

    def measurements(self) -> list[Measurement]:
        return self.tuning.measurements(ABOUT)


@bounded
@given(
    factors=st.lists(st.floats(0.3, 3.0), min_size=len(RIVALS), max_size=len(RIVALS)),
    usual_us=st.integers(1, 100_000),
    around_us=st.integers(1, 300),
    seed=st.integers(0, 1 << 30),
)
def test_turns_cost_at_most_the_budget_and_one_turn(
    factors: list[float], usual_us: int, around_us: int, seed: int
) -> None:
    """The cost of a turn is known only when it has ended, so the last one may exceed the budget by itself."""
    job = Job(dict(zip(RIVALS, factors, strict=True)), usual_us * 1000, around_us * 1000, 0.3, seed)
    job.run(20_000)
    one_turn_ns = 5 * usual_us * 1000 + around_us * 1000
    assert job.extra_ns <= BUDGET * job.calls_ns + 2 * one_turn_ns


@bounded
@given(seed=st.integers(0, 1 << 30), calls=st.integers(1, 30_000))
def test_equal_facts_lead_to_equal_decisions(seed: int, calls: int) -> None:
    one, other = (Job({RIVALS[0]: 0.5}, 200_000, 40_000, 0.5, seed) for _ in range(2))
    one.run(calls)
    other.run(calls)
    assert one.turns == other.turns
    assert one.tuning.pause == other.tuning.pause
    assert one.measurements() == other.measurements()


def test_faster_rival_is_measured_and_wins() -> None:
    job = Job({RIVALS[1]: 0.5, RIVALS[0]: 2.0}, 1_000_000, 50_000, 0.05, 1)
    job.run(20_000)
    table = compiled(job.measurements())
    ((context, decision),) = table.decisions.items()
    assert (context.machine, context.collective, context.ranks, decision.reach) == ("here", "allreduce", 4, REACH)
    assert decision.variant_at(ASKED.nbytes) == RIVALS[1]
    assert decision.times_s.keys() == {CHAMPION, RIVALS[0], RIVALS[1]}


def test_rivals_that_are_alike_are_not_measured_and_leave() -> None:
    job = Job({}, 1_000_000, 50_000, 0.5, 1)
    job.run(20_000)
    assert not job.measurements()
    assert set(Counter(filter(None, job.turns)).values()) == {MOST_TRIALS + 1}
    assert job.tuning.pause == IDLE


def test_few_trials_are_no_measurement() -> None:
    job = Job({RIVALS[0]: 0.5}, 1_000_000, 50_000, 0.0, 1)
    while job.turns.count(RIVALS[0]) < FEWEST_TRIALS:
        job.run(1)
        assert not any(each.variant == RIVALS[0] for each in job.measurements())


def test_expensive_trial_waits_for_the_budget() -> None:
    job = Job({RIVALS[0]: 1000.0}, 1_000_000, 1, 0.0, 1)
    job.run(3000)
    assert job.turns[0] is None  # the champion has the first turn
    assert job.turns.count(RIVALS[0]) <= 3
    assert job.tuning._spent_ns > BUDGET * job.calls_ns
    assert job.turns[-50:] == [None] * 50


def test_rivals_are_near_the_best_and_change_no_property_of_the_result() -> None:
    far = rivals(Question("allreduce", 8, 64, "tcp", hosts=()), "ring", NO_STATE)
    assert 0 < len(far) <= 6
    assert "ring" not in far
    assert max(far.values()) <= 2 * min(far.values())
    assert not {"one_shot", "two_shot", "swing", "mpi.native"} & set(RIVALS)


def test_times_are_scaled_to_those_of_earlier_jobs() -> None:
    quiet, busy = Job({RIVALS[0]: 0.5}, 1_000_000, 1, 0.0, 1), Job({RIVALS[0]: 0.5}, 8_000_000, 1, 0.0, 2)
    for job in (quiet, busy):
        job.run(20_000)
    before = quiet.measurements()
    scaled = {each.variant: each.median_s for each in busy.tuning.measurements(ABOUT, before)}
    assert scaled[CHAMPION] == pytest.approx(1e-3)
    assert scaled[RIVALS[0]] == pytest.approx(5e-4)


@bounded
@given(
    times=st.lists(st.tuples(st.integers(0, 10**15), st.integers(0, 10**9), st.integers(0, 1)), min_size=2, max_size=6)
)
def test_time_of_a_call_begins_with_its_last_rank_on_the_slowest_host(times: list[tuple[int, int, int]]) -> None:
    ranks = [(began, began + took, host) for began, took, host in (*times, (5, 2, 0), (7, 1, 1))]
    rows = [facts_of_rank(host, 2, (began, ended), 3, 10 + rank) for rank, (began, ended, host) in enumerate(ranks)]
    facts = agreed_facts([max(column) for column in zip(*rows, strict=True)], 2)
    spans = [
        max(ended for _, ended, host in ranks if host == which)
        - max(began for began, _, host in ranks if host == which)
        for which in (0, 1)
    ]
    assert facts == Facts(max(spans), 3, 10)


def test_first_turn_comes_after_some_calls_and_trials_travel_in_the_log() -> None:
    assert JobTuning().pause == FIRST
    job = Job({RIVALS[0]: 0.5}, 1_000_000, 1, 0.0, 1)
    job.run(20_000)
    for measurement in job.measurements():
        assert read_line(line_of(measurement)) == measurement
        assert measurement.trial
