"""Measures calls on crowded cores: ``unisono bench crowded [--situations 4,8,16,2+14] [--sizes 8,64K,1M] [--json]``.

A situation is a number of ranks, and after a plus the number of processes that compute meanwhile without end. Ranks and
processes are bound to no core, so the system's scheduler places them. All of them belong to the cgroup of this process.
Linux may also share cores among sessions, if ``/proc/sys/kernel/sched_autogroup_enabled`` is 1. The libraries are
Unisono, Gloo, and MPI libraries whose waiting ranks yield. They run in turns: while the ranks of one run, those of the
others sleep.

A time is that of a loop of calls, divided by their number. It is a mean, because the rare calls in which a rank has
lost its core take most of the time of a program. Of each library the table has the median over rounds. The ratio is the
geometric mean over rounds of a peer's time divided by Unisono's, with its 95 % interval: above 1, Unisono is faster.
``unisono bench peers install gloo openmpi mpich`` installs the peers.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.status import Status
from rich.table import Table

from unisono.bench import argument_types
from unisono.bench.peers import Library, peer, unisono_over
from unisono.bench.ranks import BenchJob, JobError, RefusedError, calls_taking, elapsed_s
from unisono.bench.sizes import format_size, parse_sizes
from unisono.bench.statistics import Ratio, paired_ratio
from unisono.errors import UsageError
from unisono.foundation.processes import python_command
from unisono.foundation.program import begin

PEERS = "gloo,openmpi-yield,mpich-yield"
OURS = "unisono-shm"
DEADLINE_S = 300.0  # of an answer: ranks that import torch start slowly on crowded cores
SHORTEST_S = 0.05  # of the loop from which the speed is estimated
# Computes until the input ends, at which another thread waits.
BUSY = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()
while True:
    pass
"""


class Situation(NamedTuple):
    """The number of ranks, and that of busy processes beside them."""

    ranks: int
    busy: int

    @classmethod
    def parsed(cls, text: str) -> Situation:
        """Return the situation of a text such as "4" or "2+14"."""
        ranks, plus, busy = text.partition("+")
        try:
            situation = cls(int(ranks), int(busy) if plus else 0)
        except ValueError:
            situation = cls(0, 0)
        if situation.ranks < 1 or situation.busy < 0:
            raise argparse.ArgumentTypeError(f"{text!r} is no situation: write ranks or ranks+busy, such as 2+14")
        return situation

    def __str__(self) -> str:
        return f"{self.ranks} ranks" + (f" and {self.busy} busy processes" if self.busy else "")


@dataclass(frozen=True, slots=True)
class Row:
    """The results at one size: the time of a call in each round, in microseconds, by library."""

    situation: Situation
    nbytes: int
    times_us: dict[str, list[float]]

    def ratio(self, library: str) -> Ratio:
        """Return the time of a peer divided by Unisono's."""
        return paired_ratio(self.times_us[library], self.times_us[OURS])


def main() -> int:
    """Measure the situations, print a table, and return 1 if a library failed."""
    options = _parser().parse_args()
    console = Console(stderr=True)
    failures: list[str] = []
    rows: list[Row] = []
    try:
        sizes = parse_sizes(options.sizes)
        libraries = (unisono_over("shm"), *(peer(name) for name in options.against.split(",") if name))
    except UsageError as error:
        raise SystemExit(f"unisono: {error}") from None
    with console.status("starting") as status:
        for situation in options.situations:
            study = Study(options.collective, situation, libraries, options.rounds, options.seconds, status)
            rows += study.run(sizes)
            failures += study.failures
    for failure in failures:
        console.print(failure, markup=False)
    if options.json:
        sys.stdout.write(json.dumps(as_json(options.collective, rows)) + "\n")
    else:
        Console().print(table(options.collective, rows))
    return int(bool(failures))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("collective", nargs="?", default="allreduce", choices=["allreduce", "alltoall", "allgather"])
    parser.add_argument(
        "--situations",
        type=lambda text: [Situation.parsed(part) for part in text.split(",")],
        default="4,8,16,2+14",
        help="ranks or ranks+busy, with commas between",
    )
    parser.add_argument("--sizes", default="8,64K,1M")
    parser.add_argument("--against", default=PEERS)
    parser.add_argument("--rounds", type=argument_types.count, default=7)
    parser.add_argument("--seconds", type=argument_types.duration, default=0.5, help="of each library in a round")
    parser.add_argument("--json", action="store_true")
    return parser


def as_json(collective: str, rows: Sequence[Row]) -> list[dict[str, object]]:
    """Return the results for machines."""
    return [
        {"collective": collective, **row.situation._asdict(), "nbytes": row.nbytes, "times_us": row.times_us}
        for row in rows
    ]


def table(collective: str, rows: Sequence[Row]) -> Table:
    """Return the results for people."""
    names = list(dict.fromkeys(name for row in rows for name in row.times_us))
    others = [name for name in names if name != OURS]
    shown = Table("situation", "size", *(f"{name}, µs" for name in names), *(f"{name} ÷ ours" for name in others))
    shown.title = f"{collective} on crowded cores"
    for row in rows:
        times = [f"{median(row.times_us[name]):,.1f}" if name in row.times_us else "-" for name in names]
        ratios = ["{:.2f} ({:.2f}–{:.2f})".format(*row.ratio(name)) if _has_both(row, name) else "-" for name in others]
        shown.add_row(str(row.situation), format_size(row.nbytes), *times, *ratios)
    return shown


def _has_both(row: Row, name: str) -> bool:
    return OURS in row.times_us and name in row.times_us


class Study:
    """The measurement of a situation.

    Attributes:
        failures: the failures of libraries, in words.
    """

    def __init__(
        self,
        collective: str,
        situation: Situation,
        libraries: Sequence[Library],
        rounds: int,
        seconds: float,
        status: Status,
    ) -> None:
        self._collective = collective
        self._situation = situation
        self._libraries = libraries
        self._rounds = rounds
        self._seconds = seconds
        self._status = status
        self._random = random.Random(0)
        self.failures: list[str] = []

    def run(self, sizes: Sequence[int]) -> list[Row]:
        """Return a row for each size; all processes have ended when this returns or raises."""
        with ExitStack() as cleanup:
            jobs: dict[str, BenchJob] = {}
            for library in self._libraries:
                self._status.update(f"{self._situation}: starting {library.name}")
                try:
                    jobs[library.name] = BenchJob(library, self._situation.ranks, (), DEADLINE_S)
                    cleanup.callback(jobs[library.name].close)
                except JobError as error:
                    self.failures.append(f"{self._situation}, {library.name}: {error}")
            with busy_processes(self._situation.busy):
                return [self._row(jobs, nbytes) for nbytes in sizes]

    def _row(self, jobs: dict[str, BenchJob], nbytes: int) -> Row:
        calls = {}
        for name, job in list(jobs.items()):
            self._status.update(f"{self._situation}, {format_size(nbytes)}: verifying {name}")
            try:
                calls[name] = self._prepare(job, nbytes)
            except (JobError, RefusedError) as error:
                self.failures.append(f"{self._situation}, {format_size(nbytes)}, {name}: {error}")
                if isinstance(error, JobError):
                    del jobs[name]
        times: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(self._rounds):
            self._status.update(f"{self._situation}, {format_size(nbytes)}: round {number + 1} of {self._rounds}")
            for name in self._random.sample(sorted(calls), len(calls)):
                times[name].append(_repeat(jobs[name], calls[name]) / calls[name] * 1e6)
        return Row(self._situation, nbytes, times)

    def _prepare(self, job: BenchJob, nbytes: int) -> int:
        """Verify the call, and return how many fill a round."""
        job.ask("prepare", DEADLINE_S, collective=self._collective, dtype="float32", count=max(1, nbytes // 4))
        job.ask("verify", DEADLINE_S)
        calls, seconds = calls_taking(SHORTEST_S, partial(_repeat, job))
        return max(1, round(calls * self._seconds / seconds))


def _repeat(job: BenchJob, calls: int) -> float:
    """Return the seconds of a loop of calls on the slowest rank."""
    return elapsed_s(job.ask("repeat", DEADLINE_S, iterations=calls))


@contextmanager
def busy_processes(number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Yield `number` processes that compute without end. They also end when this process does, however it ends."""
    command = python_command(BUSY)
    processes = []
    with ExitStack() as cleanup:
        for _ in range(number):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            processes.append(cleanup.enter_context(process))
            cleanup.callback(processes[-1].kill)
        yield processes


if __name__ == "__main__":
    begin()
    sys.exit(main())
