"""Measures how long ranks take to start: ``unisono bench bootstrap [--ranks 16,64] [--stores tcp,file]``.

Ranks are processes of this machine, forked from one that has already imported Unisono, so that Python's imports do not
count. A rank calls `init`, and then one barrier, for which links are opened. The ranks meet in a store: "tcp", which
rank 0 serves; "file", a new folder; or a Redis server, given by its URL. Each time is that of the slowest rank, from
the moment at which all ranks begin. The median of the repeats is shown; stores take turns. With many more ranks than
cores, the times include those of the system's scheduler.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import secrets
import signal
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

import unisono as un
from unisono.bench import argument_types
from unisono.foundation.program import begin

DEADLINE_S = 120.0
_TIMES = struct.Struct("!dd")


class StartTimes(NamedTuple):
    """The seconds of `init` and of a barrier among `ranks`, the CPU time of a rank, and the memory of the largest."""

    store: str
    ranks: int
    init_s: float
    barrier_s: float
    cpu_s: float
    resident_mib: float


def main() -> None:
    """Measure how long ranks take to start, as the command line asks, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=argument_types.counts, default=[16, 64])
    parser.add_argument("--stores", type=lambda text: text.split(","), default=["tcp"])
    parser.add_argument("--repeats", type=argument_types.count, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warm(options.stores)
    console = Console(stderr=True)
    # Without a refresh thread, because it would not exist in the forked ranks.
    sizes = track(options.ranks, "starting", console=console, transient=True, auto_refresh=False)
    rows = [row for ranks in sizes for row in measure(options.stores, ranks, options.repeats)]
    if options.json:
        sys.stdout.write(json.dumps([row._asdict() for row in rows]) + "\n")
        return
    Console().print(table(rows))


def table(rows: Sequence[StartTimes]) -> Table:
    """Return the rows as a table for people."""
    shown = Table("store", "ranks", "init", "first barrier", "CPU time of a rank", "memory of the largest")
    for row in rows:
        times = (f"{seconds * 1e3:.0f} ms" for seconds in (row.init_s, row.barrier_s, row.cpu_s))
        shown.add_row(row.store, str(row.ranks), *times, f"{row.resident_mib:.0f} MiB")
    return shown


def warm(stores: Sequence[str]) -> None:
    """Import the modules that a rank needs, without opening anything that a fork would share."""
    assert un.init is not None
    assert un.Options is not None
    if any(store.startswith("redis") for store in stores):
        importlib.import_module("redis")


def measure(stores: Sequence[str], ranks: int, repeats: int) -> list[StartTimes]:
    """Return for each store the median of several starts of `ranks` ranks."""
    starts: dict[str, list[tuple[float, ...]]] = {store: [] for store in stores}
    for _ in range(repeats):
        for store in stores:
            with url_of(store) as url:
                starts[store].append(meet(url, ranks))
    return [
        StartTimes(store.partition("://")[0], ranks, *(statistics.median(times) for times in zip(*each, strict=True)))
        for store, each in starts.items()
    ]


@contextmanager
def url_of(store: str) -> Iterator[str]:
    """Yield the URL of a store for one job: of "tcp", of "file", or of a Redis server with a prefix of its own."""
    if store == "tcp":
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        yield f"tcp://127.0.0.1:{port}"
    elif store == "file":
        with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
            yield f"file://{folder}/store"
    else:
        yield f"{store}?prefix={secrets.token_hex(8)}:"


def meet(store: str, ranks: int) -> tuple[float, float, float, float]:
    """Start ranks, let them find each other once, and return the measured fields of `StartTimes`.

    Raises:
        RuntimeError: a rank failed; its output says why.
    """
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
