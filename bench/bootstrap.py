"""Measures how long ranks take to start: ``python -m unisono.bench.bootstrap [--ranks 16,64] [--repeats 3] [--json]``.

Ranks are processes of this machine, forked from one that has already imported Unisono, so that Python's imports do not
count. A rank calls `init` with a TCP store that rank 0 serves, and then one barrier, for which links are opened. Each
time is that of the slowest rank, from the moment at which all ranks begin. The median of the repeats is shown. With
many more ranks than cores, the times include those of the system's scheduler.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import struct
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

import unisono as un
from unisono.program import begin

DEADLINE_S = 120.0
_TIMES = struct.Struct("!dd")


class Row(NamedTuple):
    """The seconds of `init` and of a barrier among `ranks`, the CPU time of a rank, and the memory of the largest."""

    ranks: int
    init_s: float
    barrier_s: float
    cpu_s: float
    resident_mib: float


def main() -> None:
    """Measure how long ranks take to start, as the command line asks, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=lambda text: [int(part) for part in text.split(",")], default=[16, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warm()
    console = Console(stderr=True)
    # Without a refresh thread, because it would not exist in the forked ranks.
    sizes = track(options.ranks, "starting", console=console, transient=True, auto_refresh=False)
    rows = [measure(ranks, options.repeats) for ranks in sizes]
    if options.json:
        sys.stdout.write(json.dumps([row._asdict() for row in rows]) + "\n")
        return
    Console().print(table(rows))


def table(rows: Sequence[Row]) -> Table:
    """Return the rows as a table for people."""
    shown = Table("ranks", "init", "first barrier", "CPU time of a rank", "memory of the largest")
    for row in rows:
        times = (f"{seconds * 1e3:.0f} ms" for seconds in (row.init_s, row.barrier_s, row.cpu_s))
        shown.add_row(str(row.ranks), *times, f"{row.resident_mib:.0f} MiB")
    return shown


def warm() -> None:
    """Import the modules that a rank needs, without opening anything that a fork would share."""
    assert un.init is not None
    assert un.Options is not None


def measure(ranks: int, repeats: int) -> Row:
    """Return the median of several starts of `ranks` ranks."""
    starts = [meet(ranks) for _ in range(repeats)]
    return Row(ranks, *(statistics.median(times) for times in zip(*starts, strict=True)))


def meet(ranks: int) -> tuple[float, float, float, float]:
    """Start ranks, let them find each other once, and return the measured fields of `Row`.

    Raises:
        RuntimeError: a rank failed; its output says why.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        store = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    begin_reader, begin_writer = os.pipe()
    result_reader, result_writer = os.pipe()
    children = []
    try:
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                os.close(begin_writer)
                _be_rank(rank, ranks, store, begin_reader, result_writer)
            children.append(child)
        os.close(result_writer)
        began = time.monotonic()
        os.close(begin_writer)  # which lets all ranks begin
        times = [(end - began, barrier_s) for end, barrier_s in _results(result_reader, ranks)]
    finally:
        os.close(begin_reader)
        os.close(result_reader)
        usages = [os.wait4(child, 0)[2] for child in children]
    cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in usages) / ranks
    slowest = max(end for end, _ in times), max(barrier_s for _, barrier_s in times)
    return *slowest, cpu_s, max(usage.ru_maxrss for usage in usages) / 1024


def _be_rank(rank: int, ranks: int, store: str, begin: int, result: int) -> None:
    """Run as a rank, and end the process."""
    signal.alarm(int(DEADLINE_S))
    code = 1
    try:
        os.read(begin, 1)
        options = un.Options(rendezvous_timeout_s=DEADLINE_S)
        with un.init(options, store=store, rank=rank, size=ranks) as world:
            met = time.monotonic()
            world.barrier()
            os.write(result, _TIMES.pack(met, time.monotonic() - met))
            world.barrier()  # so that no rank leaves while others are still in the first barrier
        code = 0
    except un.UnisonoError as error:
        sys.stderr.write(f"rank {rank}: {error}\n")
    finally:
        os._exit(code)


def _results(reader: int, ranks: int) -> list[tuple[float, float]]:
    """Return the records of all ranks; a record is short enough for one atomic write."""
    data = b""
    while piece := os.read(reader, 1 << 16):
        data += piece
    if len(data) != ranks * _TIMES.size:
        raise RuntimeError(f"{ranks - len(data) // _TIMES.size} of {ranks} ranks failed")
    return [(end, barrier_s) for end, barrier_s in _TIMES.iter_unpack(data)]


if __name__ == "__main__":
    begin()
    main()
