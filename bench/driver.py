"""The driver: runs all libraries in randomised, interleaved rounds on the same cores and keeps every call's time.

For each size, each library's result is verified and its speed estimated, which also warms it up. Then come rounds: in
each one all libraries run, in random order and on new arrays, as many calls as fit into their share of the time budget,
while the processes of the others sleep. The placement of the cores is measured before and after a round; a round in
which it changed, or that has another placement than the one asked for, is run again. A library that fails leaves a
failure and takes no further part; one that lacks the call, or returns a wrong result, leaves one and is back at the
next size.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from unisono.bench.peers import Library
from unisono.bench.placement import cores_to_bind
from unisono.bench.ranks import Job, JobError, RefusedError
from unisono.bench.statistics import Times, slowest
from unisono.transports.host.core_distance import Placement, measure

CALIBRATION_S = 0.02
ITERATIONS = (3, 20_000)  # Bounds of the calls in one round.
ATTEMPTS = 4  # Rounds tried for each round wanted, where the placement has to be right.
SETTLE_S = 0.2
SEED = 0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure.

    Attributes:
        collective: a name in `statistics.BUS_FACTORS`.
        ranks: number of processes of each library.
        sizes: sizes in bytes of the vector: of one rank's larger buffer.
        dtype, itemsize: a name in `unisono.dtypes`, and its bytes per element, of which the sizes are multiples.
        libraries: in the order of the tables.
        rounds: rounds per size.
        seconds: time budget of one library at one size, over all rounds.
        bind: see `placement.cores_to_bind`.
        placement: "core", "near" or "far" to use rounds of that placement only, "any" for all.
        deadline_s: a library that does not answer for longer than this has failed.
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
    """What one library did in one round: the time of each call in microseconds, the maximum over ranks."""

    nbytes: int
    library: str
    round: int
    placement: Placement
    times_us: Times


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a library has no times at one size."""

    nbytes: int
    library: str
    reason: str


@dataclass(slots=True)
class Results:
    """Everything that was measured, in the order in which it was."""

    samples: list[Sample] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


class Observer(Protocol):
    """What hears of progress, between measurements only."""

    def step(self, doing: str) -> None:
        """One of `steps(settings)` steps begins."""


def steps(settings: Settings) -> int:
    """Return how many steps an observer hears of, if nothing fails."""
    return len(settings.libraries) + len(settings.sizes) * (len(settings.libraries) + settings.rounds)


class Driver:
    """One benchmark, run once.

    Attributes:
        results: what has been measured so far.
    """

    def __init__(self, settings: Settings, observer: Observer) -> None:
        self._settings = settings
        self._observer = observer
        self._cores = cores_to_bind(settings.ranks, settings.bind)
        self._round_s = settings.seconds / settings.rounds
        self._deadline_s = settings.deadline_s + 2 * self._round_s
        self._random = random.Random(SEED)
        self._jobs: dict[str, Job] = {}
        self.results = Results()

    def run(self) -> Results:
        """Measure everything; no process of any library is left when this returns or raises."""
        with ExitStack() as cleanup:
            for library in self._settings.libraries:
                self._observer.step(f"starting {library.name}")
                self._attempt(library.name, self._settings.sizes[0], partial(self._start, library, cleanup))
            for nbytes in self._settings.sizes:
                self._measure_size(nbytes)
        return self.results

    def _start(self, library: Library, cleanup: ExitStack) -> None:
        job = Job(library, self._settings.ranks, self._cores, self._settings.deadline_s)
        cleanup.callback(job.close)
        self._jobs[library.name] = job
        self.results.versions[library.name] = job.version

    def _attempt(self, library: str, nbytes: int, action: Callable[[], T]) -> T | None:
        """Return what `action` does, or None after noting why it failed; a job that has failed is let go."""
        try:
            return action()
        except (JobError, RefusedError) as error:
            self.results.failures.append(Failure(nbytes, library, str(error)))
            if isinstance(error, JobError):
                self._jobs.pop(library, None)
        return None

    def _measure_size(self, nbytes: int) -> None:
        iterations = {}
        for name, job in list(self._jobs.items()):
            self._observer.step(f"{name}, {nbytes} B: verifying")
            found = self._attempt(name, nbytes, partial(self._verify_and_calibrate, job, nbytes))
            if found is not None:
                iterations[name] = found
        kept = 0
        for _ in range(self._settings.rounds * ATTEMPTS):
            if kept < self._settings.rounds and iterations:
                kept += self._round(nbytes, kept, iterations)
        if not kept:
            reason = f"its cores were never {self._settings.placement} throughout a round"
            self.results.failures += [Failure(nbytes, name, reason) for name in iterations]

    def _verify_and_calibrate(self, job: Job, nbytes: int) -> int:
        """Return how many calls fit into a round. Raises `RefusedError` if the library lacks the call or errs."""
        settings = self._settings
        count = nbytes // settings.itemsize
        job.ask("prepare", self._deadline_s, collective=settings.collective, dtype=settings.dtype, count=count)
        _check(job.ask("verify", self._deadline_s))
        iterations = 1
        while (elapsed_s := _elapsed_s(self._ask_run(job, iterations))) < CALIBRATION_S:
            iterations *= 4
        return self._calls_in_a_round(iterations, elapsed_s)

    def _calls_in_a_round(self, iterations: int, elapsed_s: float) -> int:
        fewest, most = ITERATIONS
        return min(most, max(fewest, round(self._round_s * iterations / elapsed_s)))

    def _round(self, nbytes: int, number: int, iterations: dict[str, int]) -> bool:
        """Run all libraries once, in random order; return whether the round counts."""
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
            # An estimate that fell into a hiccup is far too low, and the next one puts it right.
            calls = self._calls_in_a_round(iterations[name], _elapsed_s(replies))
            iterations[name] = max(iterations[name], calls)
        if measure(self._cores).label != before.label:
            return False
        self.results.samples += samples
        return True

    def _run_anew(self, job: Job, iterations: int) -> list[dict[str, Any]]:
        _check(job.ask("verify", self._deadline_s))
        return self._ask_run(job, iterations)

    def _ask_run(self, job: Job, iterations: int) -> list[dict[str, Any]]:
        replies = job.ask("run", self._deadline_s, iterations=iterations)
        _check(replies)
        return replies


def _elapsed_s(replies: Sequence[dict[str, Any]]) -> float:
    return max(int(reply["elapsed_ns"]) for reply in replies) / 1e9


def _check(replies: Sequence[dict[str, Any]]) -> None:
    for rank, reply in enumerate(replies):
        if reply["wrong"]:
            raise RefusedError(f"wrong result on rank {rank}: {reply['wrong']}")
