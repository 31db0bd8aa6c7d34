"""Trials measure the time of a call with the clocks of one or several hosts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

import pytest
from support.deadlines import DEADLINE_S

import unisono as un
from unisono.collectives.measurement import call_trials
from unisono.collectives.measurement.call_trials import CallTrials, PlannedCall

LATE_S = 0.02
# The clock of the second host is ahead by this time.
AHEAD_S = 1000.0
COUNT = 3


class Clock:
    """The clock of a rank. It shows full seconds after a barrier, and advances if the rank is late or busy."""

    def __init__(self, ahead_s: float) -> None:
        self._barriers, self._ahead_s, self._passed_s = 0, ahead_s, 0.0

    def perf_counter(self) -> float:
        return self._ahead_s + self._barriers + self._passed_s

    def leave_barrier(self, late_s: float) -> None:
        self._barriers, self._passed_s = self._barriers + 1, late_s

    def advance(self, seconds: float) -> None:
        self._passed_s += seconds


class SimulatedHosts:
    """A communicator with simulated `hosts`, whose planned calls tell `after` that they have returned.

    Attributes:
        results: the `out` arrays of the planned calls.
    """

    def __init__(
        self, world: un.Communicator, hosts: tuple[tuple[int, ...], ...], after: Callable[[], None] = lambda: None
    ) -> None:
        self._world, self.hosts, self._after = world, hosts, after
        self.results: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    def plan(self, *args: Any, **settings: Any) -> Callable[[], None]:
        plan = self._world.plan(*args, **settings)
        self.results.append(settings.get("out"))

        def run() -> None:
            plan()
            self._after()

        return run


def times(world: un.Communicator, hosts: tuple[tuple[int, ...], ...], late: int, busy: int) -> list[float]:
    """Return the times of calls that take the rank `busy` longer than others. The rank `late` begins each call late."""
    clock = Clock(AHEAD_S if world.rank in hosts[-1] and len(hosts) > 1 else 0.0)
    call_trials.time = clock  # type: ignore[assignment]
    comm: Any = SimulatedHosts(world, hosts, lambda: clock.leave_barrier(LATE_S if world.rank == late else 0.0))
    call = PlannedCall(lambda: clock.advance(LATE_S if world.rank == busy else 0.0))
    return CallTrials(comm).times(repeat(call), COUNT)


def sums_of_two_calls(world: un.Communicator) -> tuple[list[float], bool]:
    """Return the result of the second of two algorithms, and whether both algorithms used the same arrays."""
    comm: Any = SimulatedHosts(world, world.hosts)
    measured = CallTrials(comm)
    for turns in [measured.planned("allreduce", 64, name) for name in ("ring", "recursive_doubling")]:
        measured.times(turns, COUNT)
    arrays = [result for result in comm.results if result is not None]
    half = len(arrays) // 2
    return arrays[0].tolist(), all(one is other for one, other in zip(arrays[:half], arrays[half:], strict=True))


def sums_of_several_runs(world: un.Communicator) -> list[float]:
    """Return the first element of each result array, after all runs but the last one, and after the last one."""
    comm: Any = SimulatedHosts(world, world.hosts)
    measured = CallTrials(comm)
    turns = measured.planned("allreduce", 64, "ring")
    arrays, result = list(comm.results), list[float]()
    for runs in (len(arrays) - 1, 1):
        for _ in range(runs):
            measured.times(turns, COUNT)
        result += [float(array[0]) for array in arrays]
    return result


@pytest.mark.parametrize(
    ("hosts", "late", "busy", "lasts_s"),
    [
        (((0, 1, 2, 3),), 1, 1, 2 * LATE_S),
        (((0, 1, 2, 3),), 1, 3, LATE_S),
        (((0, 1), (2, 3)), 1, 1, 2 * LATE_S),
        (((0, 1), (2, 3)), 3, 2, LATE_S),
        (((0, 2), (1,), (3,)), 3, 3, LATE_S),
    ],
)
def test_trial_time_is_first_start_to_last_end_on_the_slowest_host(
    hosts: tuple[tuple[int, ...], ...], late: int, busy: int, lasts_s: float
) -> None:
    results = un.launch(times, 4, hosts, late, busy, timeout_s=DEADLINE_S)
    assert results == [results[0]] * 4
    assert results[0] == pytest.approx([lasts_s] * COUNT)


def test_trials_refill_input_and_share_arrays_among_algorithms() -> None:
    results = un.launch(sums_of_two_calls, 2, timeout_s=DEADLINE_S)
    assert results == [([2.0] * 16, True)] * 2


def test_trial_runs_rotate_among_several_arrays() -> None:
    first, second = un.launch(sums_of_several_runs, 2, timeout_s=DEADLINE_S)
    assert first == second == [2.0, 2.0, 1.0, 2.0, 2.0, 2.0]
