"""Measures how long a process takes to join a job: ``unisono bench joins [--ranks 3] [--joins 50] [--json]``.

Ranks that a file store connects call `grow` every 10 ms, as a training program does after each step. One process after
another joins, meets the others in a barrier and leaves again, and the members go on without it. Three times are shown:

- `grow`, in which nobody waits: the cost of asking.
- `grow`, in which the members admit a process, on the slowest member.
- `un.join` in the process that joins, from its call to its return; it includes the time until the next `grow`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import unisono as un
from unisono.foundation.processes import python_command
from unisono.foundation.program import begin

PAUSE_S = 0.01
LIMIT_S = 300.0
NAMES = {"idle": "grow, nobody waits", "grow": "grow, a process joins", "join": "un.join"}


def main() -> None:
    """Measure how long processes take to join, as the command line asks, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--joins", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        times_s = measure(Path(folder), options.ranks, options.joins)
    if options.json:
        sys.stdout.write(json.dumps(times_s) + "\n")
        return
    table = Table("", "median", "99 %", "times")
    for name, values in times_s.items():
        median, late = np.percentile(values, [50, 99]) * 1e3
        table.add_row(NAMES[name], f"{median:.1f} ms", f"{late:.1f} ms", str(len(values)))
    Console().print(table)


def measure(folder: Path, ranks: int, joins: int) -> dict[str, list[float]]:
    """Return the seconds of each kind of call, by the names of `NAMES`.

    Raises:
        RuntimeError: a process failed; its output says why.
    """
    with open(os.open(folder / "key", os.O_WRONLY | os.O_CREAT, 0o600), "wb") as key:
        key.write(os.urandom(32))
    job = {**os.environ, "UNISONO_STORE": f"file://{folder}/store", "UNISONO_KEY_FILE": str(folder / "key")}
    places = [{**job, "UNISONO_RANK": str(rank), "UNISONO_SIZE": str(ranks)} for rank in range(ranks)]
    with contextlib.ExitStack() as started:
        members = [started.enter_context(_process(("member", str(joins)), place)) for place in places]
        by_joiners = []
        for _ in range(joins):
            with _process(("joiner",), job) as joiner:
                by_joiners.append(_answer(joiner)["join"])
        by_members = [_answer(member) for member in members]
    idle = [seconds for each in by_members for seconds in each["idle"]]
    grown = zip(*(each["grow"] for each in by_members), strict=True)
    return {"idle": idle, "grow": [max(each) for each in grown], "join": by_joiners}


@contextlib.contextmanager
def _process(role: tuple[str, ...], environ: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    command = python_command("from unisono.bench.studies.joins import take_part; take_part()", *role)
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _answer(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=LIMIT_S)
    if process.returncode:
        raise RuntimeError(f"a process of the study ended with code {process.returncode}; its output above says why")
    answer: dict[str, Any] = json.loads(output)
    return answer


def take_part() -> None:
    """Run as a member or as a joiner, and print the times as JSON."""
    role, *joins = sys.argv[1:]
    sys.stdout.write(json.dumps(_admit(int(joins[0])) if role == "member" else _join()))


def _admit(joins: int) -> dict[str, list[float]]:
    """Admit `joins` processes one after another; return the seconds of each call of `grow`."""
    times_s: dict[str, list[float]] = {"idle": [], "grow": []}
    with un.init() as world:
        while len(times_s["grow"]) < joins:
            world.barrier()
            began = time.perf_counter()
            grown = world.grow()
            times_s["idle" if grown is world else "grow"].append(time.perf_counter() - began)
            if grown is world:
                time.sleep(PAUSE_S)
            else:
                _meet(grown)
                grown.close()
    return times_s


def _join() -> dict[str, float]:
    began = time.perf_counter()
    with un.join() as world:
        seconds = time.perf_counter() - began
        _meet(world)
    return {"join": seconds}


def _meet(world: un.Communicator) -> None:
    """Meet twice, so that no rank leaves while others are still in the first barrier, which opens links."""
    world.barrier()
    world.barrier()


if __name__ == "__main__":
    begin()
    main()
