"""Measures the costs of TLS: ``unisono bench tls [--sizes 8,1K,1M,64M] [--rounds 20] [--json]``.

Two jobs of two ranks exchange messages over TCP on loopback, one without TLS and one with it. They take turns, round by
round, and each round is repeated with the jobs in the other order, so the machine treats both alike. A time is half of
that in which a message goes to the other rank and back. The table has the medians of the rounds, the smallest
times, and the processor time of one message on both ranks together, which depends less on the load of the machine.
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
from unisono.bench import argument_types
from unisono.foundation.program import begin
from unisono.options import parse_nbytes

MODES = ("off", "on")
# In a round, messages go to and fro until they have this many bytes together, but at least and at most so often.
_ROUND_NBYTES = 32 << 20
_FEWEST, _MOST = 2, 500
_DEADLINE_S = 120.0


class MessageTimes(NamedTuple):
    """The median, the smallest and the processor's seconds of a message of `nbytes`, without TLS and with it."""

    nbytes: int
    off_s: float
    on_s: float
    best_off_s: float
    best_on_s: float
    cpu_off_s: float
    cpu_on_s: float


class TlsTimes(NamedTuple):
    """The seconds of one way of a message, and those of the processor, of one rank or of both."""

    elapsed_s: float
    cpu_s: float


def main() -> None:
    """Measure the costs of TLS, as the command line asks, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = "8,1K,1M,64M"
    parser.add_argument("--sizes", type=lambda text: [parse_nbytes(part) for part in text.split(",")], default=sizes)
    parser.add_argument("--rounds", type=argument_types.count, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = measure(options.sizes, options.rounds)
    if options.json:
        sys.stdout.write(json.dumps([row._asdict() for row in rows]) + "\n")
        return
    Console().print(table(rows))


def table(rows: Sequence[MessageTimes]) -> Table:
    """Return the rows as a table for people."""
    shown = Table("bytes", "without", "with TLS", "best without", "best with", "processor without", "with")
    for row in rows:
        shown.add_row(str(row.nbytes), *(f"{seconds * 1e6:.1f} µs" for seconds in row[1:]))
    return shown


def measure(sizes: Sequence[int], rounds: int) -> list[MessageTimes]:
    """Return a row for each size, of messages between two ranks."""
    pools = {mode: un.Pool(2, options=un.Options(transports="tcp", tls=mode)) for mode in MODES}
    console = Console(stderr=True)
    try:
        return [_row(pools, nbytes, rounds) for nbytes in track(sizes, "exchanging", console=console, transient=True)]
    finally:
        for pool in pools.values():
            pool.close()


def _row(pools: dict[str, un.Pool], nbytes: int, rounds: int) -> MessageTimes:
    turns = min(max(_FEWEST, _ROUND_NBYTES // nbytes), _MOST)
    for pool in pools.values():
        _times(pool, nbytes, _FEWEST)  # which opens the channel
    times: dict[str, list[TlsTimes]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        for mode in MODES if number % 2 == 0 else reversed(MODES):
            times[mode].append(_times(pools[mode], nbytes, turns))
    medians = [statistics.median(each.elapsed_s for each in times[mode]) for mode in MODES]
    best = [min(each.elapsed_s for each in times[mode]) for mode in MODES]
    return MessageTimes(
        nbytes, *medians, *best, *(statistics.median(each.cpu_s for each in times[mode]) for mode in MODES)
    )


def _times(pool: un.Pool, nbytes: int, turns: int) -> TlsTimes:
    ranks: list[TlsTimes] = pool.run(exchange, nbytes, turns, timeout_s=_DEADLINE_S)
    return TlsTimes(ranks[0].elapsed_s, sum(rank.cpu_s for rank in ranks))


def exchange(world: un.Communicator, nbytes: int, turns: int) -> TlsTimes:
    """Send a message to and fro `turns` times; return the times of one way on this rank."""
    x, peer = np.zeros(nbytes, np.uint8), 1 - world.rank
    world.barrier()
    began, cpu_began = time.perf_counter(), time.process_time()
    for _ in range(turns):
        if world.rank == 0:
            world.send(x, peer)
            world.recv(x, peer)
        else:
            world.recv(x, peer)
            world.send(x, peer)
    return TlsTimes((time.perf_counter() - began) / (2 * turns), (time.process_time() - cpu_began) / (2 * turns))


if __name__ == "__main__":
    begin()
    main()
