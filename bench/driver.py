"""The driver runs all libraries in random, interleaved rounds on the same cores, and keeps the time of every call.

For each size, the driver first verifies each library's result and estimates its speed, which also warms it up. Then
come rounds. In each round all libraries run in random order on new arrays, while the processes of the others sleep.
Each makes as many calls as fit into its share of the time budget.

The placement of the cores is measured before and after a round. The round runs again if the placement changed, or is
not the requested one.

A library that fails is reported and dropped. A library that lacks the call or returns a wrong result is reported, and
takes part again at the next size.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from unisono.bench.peers import Library
from unisono.bench.placement import cores_to_bind
from unisono.bench.ranks import BenchJob, JobError, RefusedError, calls_taking, elapsed_s
from unisono.bench.statistics import Times, slowest
from unisono.transports.host.core_distance import CorePlacement, measure

CALIBRATION_S = 0.02
ITERATIONS = (3, 20_000)  # bounds of the calls in one round
ATTEMPTS = 4  # rounds that are tried for each requested round, where the placement must be right
SETTLE_S = 0.2
SEED = 0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a benchmark.

    Attributes:
        collective: a name in `statistics.BUS_FACTORS`.
        ranks: number of processes of each library.
        sizes: bytes of the vector, which is the larger buffer of one rank.
        dtype, itemsize: a name in `unisono.dtypes`, and its bytes per element; sizes are multiples of it.
        libraries: in the order of the tables.
        rounds: rounds at each size.
        seconds: time budget of one library at one size, over all rounds.
        bind: see `placement.cores_to_bind`.
        placement: "core", "near" or "far" to use only rounds of that placement, "any" for all.
        deadline_s: a library that does not answer within this time has failed.
    """

    collective: str
    ranks: int
    sizes: tuple[int, ...]
    dtype: str
    itemsize: int
    libraries: tuple[Library, ...]
    rounds: int = 5
    seconds: float = 1.0
    bind: str = "auto"
    placement: str = "any"
    deadline_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The calls of one library in one round: the time of each in microseconds, the maximum over ranks."""

    nbytes: int
    library: str
    round: int
    placement: CorePlacement
    times_us: Times


@dataclass(frozen=True, slots=True)
class NoTimes:
    """The reason why a library has no times at one size."""

    nbytes: int
    library: str
    reason: str


@dataclass(slots=True)
class Results:
    """All results, in the order of measurement.

    Attributes:
        samples, failures, versions: the measured rounds, the failures, and the version of each library.
        load: the load average of the machine over the last minute before the measurement, in processes.
    """

    samples: list[Sample] = field(default_factory=list)
    failures: list[NoTimes] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    load: float = field(default_factory=lambda: os.getloadavg()[0])


class ProgressObserver(Protocol):
    """Is notified of progress, only between measurements."""

    def step(self, description: str) -> None:
        """Take notice that the next one of `steps(settings)` steps begins."""


def steps(settings: Settings) -> int:
    """Return the number of steps that an observer is notified of if nothing fails."""
    return len(settings.libraries) + len(settings.sizes) * (len(settings.libraries) + settings.rounds)


class BenchDriver:
    """One benchmark, which runs once.

    Attributes:
        results: the results up to now.
    """

    def __init__(self, settings: Settings, observer: ProgressObserver) -> None:
        self._settings = settings
        self._observer = observer
        self._cores = cores_to_bind(settings.ranks, settings.bind)
        self._round_s = settings.seconds / settings.rounds
        self._deadline_s = settings.deadline_s + 2 * self._round_s
        self._random = random.Random(SEED)
        self._jobs: dict[str, BenchJob] = {}
        self.results = Results()

    def run(self) -> Results:
        """Run all measurements; all processes have ended when this returns or raises."""
        with ExitStack() as cleanup:
            for library in self._settings.libraries:
                self._observer.step(f"starting {library.name}")
                self._attempt(library.name, self._settings.sizes[0], partial(self._start, library, cleanup))
            for nbytes in self._settings.sizes:
                self._measure_size(nbytes)
        return self.results

    def _start(self, library: Library, cleanup: ExitStack) -> None:
        job = BenchJob(library, self._settings.ranks, self._cores, self._settings.deadline_s)
        cleanup.callback(job.close)
        self._jobs[library.name] = job
        self.results.versions[library.name] = job.version

    def _attempt(self, library: str, nbytes: int, action: Callable[[], T]) -> T | None:
        """Return the result of `action`, or None after noting the failure; a failed job is dropped."""
        try:
            return action()
        except (JobError, RefusedError) as error:
            self.results.failures.append(NoTimes(nbytes, library, str(error)))
            if isinstance(error, JobError):
                self._jobs.pop(library, None)
        return None

    def _measure_size(self, nbytes: int) -> None:
        iterations = {}
        for name, job in list(self._jobs.items()):
            self._observer.step(f"{name}, {nbytes} B: verifying")
            calls = self._attempt(name, nbytes, partial(self._verify_and_calibrate, job, nbytes))
            if calls is not None:
                iterations[name] = calls
        kept = 0
        for _ in range(self._settings.rounds * ATTEMPTS):
            if kept < self._settings.rounds and iterations:
                kept += self._round(nbytes, kept, iterations)
        if not kept:
            reason = f"its cores were never {self._settings.placement} during a whole round"
            self.results.failures += [NoTimes(nbytes, name, reason) for name in iterations]

    def _verify_and_calibrate(self, job: BenchJob, nbytes: int) -> int:
        """Return the number of calls in a round; raises `RefusedError` if the library lacks the call or errs."""
        settings = self._settings
        count = nbytes // settings.itemsize
        job.ask("prepare", self._deadline_s, collective=settings.collective, dtype=settings.dtype, count=count)
        job.ask("verify", self._deadline_s)
        estimate = calls_taking(CALIBRATION_S, lambda calls: elapsed_s(self._run_calls(job, calls)))
        return self._calls_in_a_round(*estimate)

    def _calls_in_a_round(self, iterations: int, elapsed_s: float) -> int:
        fewest, most = ITERATIONS
        return min(most, max(fewest, round(self._round_s * iterations / elapsed_s)))

    def _round(self, nbytes: int, number: int, iterations: dict[str, int]) -> bool:
        """Run all libraries once, in random order. Return False, without times, if the cores' placement changed."""
        before = measure(self._cores)
        if self._settings.placement not in {"any", before.label}:
            time.sleep(SETTLE_S)
            return False
        self._observer.step(f"{nbytes} B: round {number + 1} of {self._settings.rounds} ({before.label})")
        samples = []
        for name in self._random.sample(sorted(iterations), len(iterations)):
            replies = self._attempt(name, nbytes, partial(self._run_anew, self._jobs[name], iterations[name]))
            if replies is None:
                del iterations[name]
                continue
            times = slowest([reply["times_ns"] for reply in replies])
            samples.append(Sample(nbytes, name, number, before, times))
            # An estimate that was disturbed is far too low, and the next one corrects it.
            calls = self._calls_in_a_round(iterations[name], elapsed_s(replies))
            iterations[name] = max(iterations[name], calls)
        if measure(self._cores).label != before.label:
            return False
        self.results.samples += samples
        return True

    def _run_anew(self, job: BenchJob, iterations: int) -> list[dict[str, Any]]:
        job.ask("verify", self._deadline_s)
        return self._run_calls(job, iterations)

    def _run_calls(self, job: BenchJob, iterations: int) -> list[dict[str, Any]]:
        return job.ask("run", self._deadline_s, iterations=iterations)
