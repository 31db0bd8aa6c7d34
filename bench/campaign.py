"""Plants seeded faults into jobs, and counts how each trial ends: correct, by the promised error, or not as promised.

    python -m unisono.bench.campaign [--trials 3000] [--first SEED] [--out bench/results/campaign.jsonl] [--json]

A trial is a job of two to four processes that make the same calls again and again, and compare every result. One of
them, the victim, has a fault at one of the calls: before it, during it or after it. `trial_of` makes the trial of a
seed, and `--first SEED --trials 1` repeats it. The time of the fault and of each error are read from the clock that
the processes of a host share, so each error has a latency.

A trial ends in one of these verdicts:

- correct: every rank has ended all calls with the right results;
- promised: every survivor has raised the error that `FAULTS` promises, naming the victim;
- wrong result, wrong error, hang: a broken promise. The command then exits with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import os
import random
import resource
import select
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import unisono as un
from unisono.program import begin

STEPS = 6
LIMIT_S = 20.0
STOPPED_S = 0.2
TIMEOUT_S = 0.7
COUNTS = (1, 1000, 50_000, 600_000)
GOOD = ("correct", "promised")


class Fault(NamedTuple):
    """A fault, and what the library promises after it.

    Attributes:
        plant: called in the victim with its communicator.
        error: the name of the error of each survivor; empty if all calls end well.
        timeout_s: the time limit of the calls.
        bound_ms: the promised latency of the error, on an idle machine.
    """

    plant: Callable[[un.Communicator], None]
    error: str
    timeout_s: float = LIMIT_S
    bound_ms: float = 100.0


def kill(_: un.Communicator) -> None:
    """Die without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def crash(_: un.Communicator) -> None:
    """Die by a segmentation fault."""
    os.kill(os.getpid(), signal.SIGSEGV)


def stop(_: un.Communicator) -> None:
    """Stop, until somebody continues this process."""
    os.kill(os.getpid(), signal.SIGSTOP)


def abort(world: un.Communicator) -> None:
    """Abort the job."""
    world.abort("planted")


def leave(world: un.Communicator) -> None:
    """Close the communicator and end."""
    world.close()
    os._exit(0)


def disagree(world: un.Communicator) -> None:
    """Make another call than the other ranks."""
    world.allreduce(np.ones(7, np.uint8), "min")


FAULTS: dict[str, Fault] = {
    "none": Fault(lambda _: None, ""),
    "SIGKILL": Fault(kill, "PeerLostError"),
    "segmentation fault": Fault(crash, "PeerLostError"),
    "SIGSTOP and SIGCONT": Fault(stop, ""),
    "SIGSTOP": Fault(stop, "CollectiveTimeoutError", timeout_s=TIMEOUT_S, bound_ms=TIMEOUT_S * 1e3 + 100),
    "abort": Fault(abort, "AbortedError"),
    "leaving": Fault(leave, "PeerLostError"),
    "another call": Fault(disagree, "MismatchError", bound_ms=1100),
}
# Faults that are signals to the whole process can happen amid a call. The others are calls of the program.
_AMID_CALLS = ("none", "SIGKILL", "segmentation fault", "SIGSTOP and SIGCONT", "SIGSTOP", "abort")

Step = Callable[[un.Communicator, int, int], tuple[Any, Any]]


def _allreduce(world: un.Communicator, count: int, salt: int) -> tuple[Any, Any]:
    x = np.arange(count) * (salt + 1) + world.rank
    return world.allreduce(x), np.arange(count) * (salt + 1) * world.size + sum(range(world.size))


def _broadcast(world: un.Communicator, count: int, salt: int) -> tuple[Any, Any]:
    root = salt % world.size
    return world.broadcast(np.arange(count) + (salt if world.rank == root else -1), root), np.arange(count) + salt


def _allgather(world: un.Communicator, count: int, salt: int) -> tuple[Any, Any]:
    part = max(1, count // world.size)
    wanted = np.concatenate([np.arange(part) + salt + rank for rank in range(world.size)])
    return world.allgather(np.arange(part) + salt + world.rank).reshape(-1), wanted


def _alltoall(world: un.Communicator, count: int, salt: int) -> tuple[Any, Any]:
    part = max(1, count // world.size)
    x = np.repeat(np.arange(world.size), part) + world.size * world.rank + salt
    return world.alltoall(x), np.repeat(np.arange(world.size), part) * world.size + world.rank + salt


def _sendrecv(world: un.Communicator, count: int, salt: int) -> tuple[Any, Any]:
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    x = np.arange(count) + salt + world.rank
    return world.sendrecv(x, after, np.empty_like(x), before), np.arange(count) + salt + before


STEPS_BY_NAME: dict[str, Step] = {
    "allreduce": _allreduce,
    "broadcast": _broadcast,
    "allgather": _allgather,
    "alltoall": _alltoall,
    "sendrecv": _sendrecv,
}


class Trial(NamedTuple):
    """The trial of a seed.

    Attributes:
        seed: its seed.
        transport, ranks: the transport and the number of ranks.
        call, elements: the collective, and the number of elements of its vector.
        fault, phase: the fault, and when it happens: "before", "during" or "after" a call.
        victim, at: the rank that has the fault, and at which of the calls.
    """

    seed: int
    transport: str
    ranks: int
    call: str
    elements: int
    fault: str
    phase: str
    victim: int
    at: int


class Outcome(NamedTuple):
    """How a trial has ended: the verdict, the latencies of the survivors' errors, and what was wrong."""

    trial: Trial
    verdict: str
    latencies_ms: tuple[float, ...]
    why: str


def trial_of(seed: int) -> Trial:
    """Return the trial of a seed; the same for all runs of one version."""
    dice = random.Random(seed)
    ranks = dice.choice((2, 3, 4))
    fault = dice.choice(tuple(FAULTS))
    # Of two ranks, one then waits for a message and the other in a collective. They do not disagree, they wait.
    calls = [name for name in STEPS_BY_NAME if fault != "another call" or name != "sendrecv"]
    return Trial(
        seed,
        dice.choice(("shm", "tcp")),
        ranks,
        dice.choice(calls),
        dice.choice(COUNTS),
        fault,
        dice.choice(("before", "during", "after") if fault in _AMID_CALLS else ("before", "after")),
        dice.randrange(ranks),
        dice.randrange(1, STEPS - 1),
    )


# --- one rank ------------------------------------------------------------------------------------------------------


def _run_rank(trial: Trial, rank: int, store: str, say: Callable[[dict[str, Any]], None]) -> None:
    fault = FAULTS[trial.fault]
    options = un.Options(transports=trial.transport, timeout_s=fault.timeout_s, log="error")
    try:
        with un.init(options, store=store, rank=rank, size=trial.ranks) as world:
            for step in range(STEPS):
                plant = fault.plant if (rank, step) == (trial.victim, trial.at) else None
                _make_call(world, trial, step, plant, say)
            world.barrier()
    except un.UnisonoError as error:
        say({"error": type(error).__name__, "ns": time.monotonic_ns(), "peer": error.peer, "text": str(error)[:300]})
    else:
        say({"done": True})


def _make_call(
    world: un.Communicator,
    trial: Trial,
    step: int,
    plant: Callable[[un.Communicator], None] | None,
    say: Callable[[dict[str, Any]], None],
) -> None:
    def planted() -> None:
        if plant is not None:
            say({"fault": True, "ns": time.monotonic_ns()})
            with contextlib.suppress(un.UnisonoError):
                plant(world)

    if trial.phase == "before":
        planted()
    timer = threading.Timer(random.Random(trial.seed).random() * 2e-3, planted)
    if trial.phase == "during":
        timer.start()
    result, wanted = STEPS_BY_NAME[trial.call](world, trial.elements, step)
    if not np.array_equal(result, wanted):
        say({"wrong": f"call {step} on rank {world.rank}"})
    if trial.phase == "during":
        timer.join()
    if trial.phase == "after":
        planted()
    world.barrier()  # no rank runs ahead, so every survivor needs the victim


def _be_rank(trial: Trial, rank: int, store: str, pipe: int) -> None:
    """Be a rank of a trial, in a process that has just been forked. Never returns."""
    status = 1
    try:
        faulthandler.disable()  # a planted crash needs no report
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with os.fdopen(pipe, "wb", buffering=0) as to_parent:
            _run_rank(trial, rank, store, lambda line: _write(to_parent, line))
        status = 0
    finally:
        os._exit(status)


def _write(pipe: io.RawIOBase | io.FileIO, line: dict[str, Any]) -> None:
    pipe.write(json.dumps(line).encode() + b"\n")


# --- a job ---------------------------------------------------------------------------------------------------------


class _Job:
    """The processes of a trial, which are forked from this one, and what they have said.

    Attributes:
        said: by rank, the lines that it has said.
    """

    def __init__(self, trial: Trial, store: str) -> None:
        self.said: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(trial.ranks)}
        self._pids: dict[int, int] = {}
        self._pipes: dict[int, int] = {}
        self._unfinished: dict[int, bytes] = defaultdict(bytes)  # lines
        for rank in range(trial.ranks):
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reading)
                _be_rank(trial, rank, store, writing)
            os.close(writing)
            self._pids[rank], self._pipes[rank] = pid, reading

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *_: object) -> None:
        for rank, pid in self._pids.items():
            os.kill(pid, signal.SIGKILL)  # one that has ended is there until it is waited for
            os.waitpid(pid, 0)
            if rank in self._pipes:
                os.close(self._pipes.pop(rank))

    def listen(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Read what the ranks say until a condition holds; return False if it does not hold within the limit."""
        end = time.monotonic() + limit_s
        while not until():
            if time.monotonic() >= end:
                return False
            readable, _, _ = select.select(list(self._pipes.values()), [], [], 0.01)
            for rank in [rank for rank, pipe in self._pipes.items() if pipe in readable]:
                self._read(rank)
        return True

    def has_ended(self, ranks: Iterable[int]) -> bool:
        """Return whether the processes of these ranks have ended."""
        return not any(rank in self._pipes for rank in ranks)

    def fault_ns(self) -> int | None:
        """Return the time of the fault, once it has happened."""
        return next((line["ns"] for lines in self.said.values() for line in lines if "fault" in line), None)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to the process of a rank."""
        os.kill(self._pids[rank], number)

    def _read(self, rank: int) -> None:
        data = os.read(self._pipes[rank], 1 << 16)
        if not data:
            os.close(self._pipes.pop(rank))
        *lines, self._unfinished[rank] = (self._unfinished[rank] + data).split(b"\n")
        self.said[rank] += map(json.loads, lines)


def run(trial: Trial) -> Outcome:
    """Run a trial. It ends within some tens of seconds, whatever happens, and leaves no process."""
    survivors = [rank for rank in range(trial.ranks) if rank != trial.victim or not FAULTS[trial.fault].error]
    with tempfile.TemporaryDirectory() as folder, _Job(trial, f"file://{folder}/store") as job:
        if trial.fault == "SIGSTOP and SIGCONT":
            job.listen(lambda: job.fault_ns() is not None or job.has_ended(survivors), LIMIT_S)
            time.sleep(STOPPED_S)
            job.signal(trial.victim, signal.SIGCONT)
        have_ended = job.listen(lambda: job.has_ended(survivors), LIMIT_S)
        fault_ns = job.fault_ns()
    if not have_ended:
        late = [rank for rank in survivors if not any({"done", "error"} & set(line) for line in job.said[rank])]
        return Outcome(trial, "hang", (), f"ranks {late} have neither ended nor raised an error")
    return _judged(trial, {rank: job.said[rank] for rank in survivors}, fault_ns)


def _judged(trial: Trial, said: dict[int, list[dict[str, Any]]], fault_ns: int | None) -> Outcome:
    lines = [(rank, line) for rank, of_rank in said.items() for line in of_rank]
    if wrong := [line["wrong"] for _, line in lines if "wrong" in line]:
        return Outcome(trial, "wrong result", (), "; ".join(wrong))
    ends = {rank: line for rank, line in lines if "done" in line or "error" in line}
    silent = sorted(set(said) - set(ends))
    if silent:
        return Outcome(trial, "wrong error", (), f"ranks {silent} have crashed")
    promised = FAULTS[trial.fault].error
    for rank, line in ends.items():
        if line.get("error", "") != promised:
            return Outcome(trial, "wrong error", (), f"rank {rank}: {line.get('error', 'no error')} {line.get('text')}")
        if promised and line["peer"] != trial.victim and f"rank {trial.victim}" not in line["text"]:
            return Outcome(trial, "wrong error", (), f"rank {rank} does not name rank {trial.victim}: {line['text']}")
    if not promised:
        return Outcome(trial, "correct", (), "")
    assert fault_ns is not None, "an error without a fault"
    return Outcome(trial, "promised", tuple((line["ns"] - fault_ns) / 1e6 for line in ends.values()), "")


# --- the campaign --------------------------------------------------------------------------------------------------


def show(outcomes: Sequence[Outcome]) -> Table:
    """Return a table of the verdicts and latencies by fault and transport."""
    table = Table("fault", "transport", "trials", "as promised", "p50 ms", "p99 ms", "worst ms", "bound ms")
    by_row: defaultdict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_row[outcome.trial.fault, outcome.trial.transport].append(outcome)
    for (fault, transport), rows in sorted(by_row.items()):
        latencies = sorted(latency for row in rows for latency in row.latencies_ms)
        good = sum(row.verdict in GOOD for row in rows)
        shown = ["", "", "", ""]
        if latencies:
            at_99 = latencies[min(len(latencies) - 1, int(0.99 * len(latencies)))]
            times = (statistics.median(latencies), at_99, latencies[-1], FAULTS[fault].bound_ms)
            shown = [f"{time_ms:.0f}" for time_ms in times]
        table.add_row(fault, transport, str(len(rows)), str(good), *shown)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials that the arguments ask for, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m unisono.bench.campaign", description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=150, help="how many trials to run")
    parser.add_argument(
        "--first", type=int, default=0, help="the seed of the first trial; the next have the next seeds"
    )
    parser.add_argument("--out", type=Path, help="a file to which a line for each trial is appended")
    parser.add_argument("--json", action="store_true", help="write the outcomes to stdout as JSON lines")
    chosen = parser.parse_args(arguments)
    console = Console(stderr=chosen.json)
    seeds = range(chosen.first, chosen.first + chosen.trials)
    outcomes = []
    for seed in track(seeds, "trials", console=console, disable=not console.is_terminal):
        outcome = run(trial_of(seed))
        outcomes.append(outcome)
        line = json.dumps({**outcome.trial._asdict(), **outcome._asdict(), "trial": seed})
        if chosen.json:
            sys.stdout.write(line + "\n")
        if chosen.out:
            with chosen.out.open("a") as file:
                file.write(line + "\n")
        if outcome.verdict not in GOOD:
            console.print(f"seed {seed}: {outcome.verdict}: {outcome.why}; {outcome.trial}", markup=False)
    console.print(show(outcomes))
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    console.print(", ".join(f"{verdict}: {number}" for verdict, number in sorted(verdicts.items())))
    return 0 if set(verdicts) <= set(GOOD) else 1


if __name__ == "__main__":
    begin()
    sys.exit(main())
