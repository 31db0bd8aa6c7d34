"""Measures allreduce in compiled programs of JAX: ``unisono bench jax_calls [-n 2] [--json]``.

The libraries are `unisono.jax`, mpi4jax on Open MPI and on MPICH, and XLA's own collectives over Gloo and over Unisono.
Each has ranks of its own, because a process can have only one MPI library. The driver of `unisono bench` runs them in
turns: while the ranks of one run, those of the others sleep. ``make peers PEERS="openmpi-jax mpich-jax"`` installs
mpi4jax.

A program makes several allreduces of float32, each of the mean of the one before. A time is an allreduce's part of a
program on the slowest rank. Of a round, it is the median of its programs. The table has the median of the rounds, and
the best round, which other programs of the machine disturb the least.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.status import Status
from rich.table import Table

from unisono.bench import argument_types
from unisono.bench.adapters.jax_programs import calls_of
from unisono.bench.driver import BenchDriver, Results, Settings
from unisono.bench.peers import peer
from unisono.bench.sizes import format_size, parse_sizes
from unisono.errors import UsageError
from unisono.foundation.program import begin

LIBRARIES = ("jax-unisono", "jax-xla-unisono", "jax-gloo", "mpi4jax-openmpi", "mpi4jax-mpich")
STATISTICS: dict[str, Callable[[Sequence[float]], Any]] = {"median": np.median, "best": np.min}
SIZES = "8,1K,64K,1M,16M,64M"


def main() -> None:
    """Measure the calls, and print a row for each size."""
    begin()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # The means of powers of two are exact, so results are equal bit by bit.
    parser.add_argument("-n", "--ranks", type=int, default=2, choices=[1, 2, 4, 8])
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--rounds", type=argument_types.count, default=9)
    parser.add_argument(
        "--seconds", type=argument_types.duration, default=1.0, help="of each library at each size, over all rounds"
    )
    parser.add_argument("--libraries", default=",".join(LIBRARIES))
    parser.add_argument("--bind", choices=["none", "core"], default="none", help="core: bind each rank to a core")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    console = Console(stderr=True)
    try:
        settings = Settings(
            "allreduce",
            options.ranks,
            parse_sizes(options.sizes),
            "float32",
            4,
            tuple(peer(name) for name in options.libraries.split(",")),
            options.rounds,
            options.seconds,
            options.bind,
        )
    except UsageError as error:
        raise SystemExit(f"unisono: {error}") from None
    load = os.getloadavg()[0]
    with console.status("starting") as status:
        results = BenchDriver(settings, _Observer(status)).run()
    for failure in results.failures:
        console.print(f"{failure.library} at {format_size(failure.nbytes)}: {failure.reason}", markup=False)
    rows = times_of(results)
    if options.json:
        machine = {"cores": os.cpu_count(), "load": [round(load, 1), round(os.getloadavg()[0], 1)]}
        shown = {"ranks": options.ranks, "bind": options.bind, **machine, "versions": results.versions, "rows": rows}
        sys.stdout.write(json.dumps(shown) + "\n")
    else:
        Console().print(_table(options.ranks, rows))
    raise SystemExit(bool(results.failures))


def times_of(results: Results) -> dict[str, dict[str, dict[str, float]]]:
    """Return the statistics of an allreduce in microseconds, by size, library and name of the statistic."""
    rounds: dict[tuple[int, str], list[float]] = {}
    for sample in results.samples:
        time_us = float(np.median(sample.times_us)) / calls_of(sample.nbytes)
        rounds.setdefault((sample.nbytes, sample.library), []).append(time_us)
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for (nbytes, library), times in sorted(rounds.items()):
        statistics = {name: round(float(take(times)), 2) for name, take in STATISTICS.items()}
        rows.setdefault(format_size(nbytes), {})[library] = statistics
    return rows


class _Observer:
    """Shows the step of the driver."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def step(self, description: str) -> None:
        self._status.update(description)


def _table(ranks: int, rows: dict[str, dict[str, dict[str, float]]]) -> Table:
    libraries = list(dict.fromkeys(library for row in rows.values() for library in row))
    table = Table("bytes", "µs", *libraries, title=f"allreduce in a program of JAX, {ranks} ranks")
    for size, row in rows.items():
        for name in STATISTICS:
            cells = (f"{row[library][name]:,.1f}" if library in row else "-" for library in libraries)
            table.add_row(size, name, *cells)
    return table


if __name__ == "__main__":
    main()
