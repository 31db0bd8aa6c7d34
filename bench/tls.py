"""Measures what TLS costs: ``python -m unisono.bench.tls [--sizes 8,1K,1M,64M] [--rounds 20] [--json]``.

Two jobs of two ranks exchange messages over TCP on loopback, one without TLS and one with it. They take turns, round by
round, and each round is repeated with the jobs in the other order, so the machine treats both alike. A time is half of
that in which a message goes to the other rank and back. The medians of the rounds are shown, and the smallest times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import unisono as un
from unisono.options import parse_nbytes
from unisono.program import begin

MODES = ("off", "on")
# A round takes about so long, but each message goes at least so often.
_ROUND_S = 0.02
_FEWEST = 2
_DEADLINE_S = 120.0


class Row(NamedTuple):
    """The median and the smallest seconds of a message of `nbytes`, without TLS and with it."""

    nbytes: int
    off_s: float
    on_s: float
    best_off_s: float
    best_on_s: float


def main() -> None:
    """Measure what TLS costs, as the command line asks, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = "8,1K,1M,64M"
    parser.add_argument("--sizes", type=lambda text: [parse_nbytes(part) for part in text.split(",")], default=sizes)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = measure(options.sizes, options.rounds)
    if options.json:
        sys.stdout.write(json.dumps([row._asdict() for row in rows]) + "\n")
        return
    Console().print(table(rows))


def table(rows: Sequence[Row]) -> Table:
    """Return the rows as a table for people."""
    shown = Table("bytes", "without TLS", "with TLS", "best without", "best with", "bandwidth without", "with")
    for row in rows:
        times = (f"{seconds * 1e6:.1f} µs" for seconds in row[1:])
        rates = (f"{row.nbytes / seconds / 1e9:.2f} GB/s" for seconds in (row.off_s, row.on_s))
        shown.add_row(str(row.nbytes), *times, *rates)
    return shown


def measure(sizes: Sequence[int], rounds: int) -> list[Row]:
    """Return a row for each size, of messages between two ranks."""
    pools = {mode: un.Pool(2, options=un.Options(transports="tcp", tls=mode)) for mode in MODES}
    console = Console(stderr=True)
    try:
        return [_row(pools, nbytes, rounds) for nbytes in track(sizes, "exchanging", console=console, transient=True)]
    finally:
        for pool in pools.values():
            pool.close()


def _row(pools: dict[str, un.Pool], nbytes: int, rounds: int) -> Row:
    turns = {mode: max(_FEWEST, int(_ROUND_S / _turn_s(pools[mode], nbytes, _FEWEST))) for mode in MODES}
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        for mode in MODES if number % 2 == 0 else reversed(MODES):
            times[mode].append(_turn_s(pools[mode], nbytes, turns[mode]))
    medians = [statistics.median(times[mode]) for mode in MODES]
    return Row(nbytes, *medians, *(min(times[mode]) for mode in MODES))


def _turn_s(pool: un.Pool, nbytes: int, turns: int) -> float:
    seconds: float = pool.run(exchange, nbytes, turns, timeout_s=_DEADLINE_S)[0]
    return seconds


def exchange(world: un.Communicator, nbytes: int, turns: int) -> float:
    """Send a message to and fro `turns` times; return the seconds of one way."""
    x, peer = np.zeros(nbytes, np.uint8), 1 - world.rank
    world.barrier()
    began = time.perf_counter()
    for _ in range(turns):
        if world.rank == 0:
            world.send(x, peer)
            world.recv(x, peer)
        else:
            world.recv(x, peer)
            world.send(x, peer)
    return (time.perf_counter() - began) / (2 * turns)


if __name__ == "__main__":
    begin()
    main()
