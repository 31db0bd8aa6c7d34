"""Measures how far calls overlap with computing: ``unisono bench overlap [-n 2] [--sizes 64K:4M] [--json]``.

Each rank computes for about as long as an allreduce takes, calls allreduce, and does both at once with ``wait=False``.
If ranks have no spare cores, only waiting can overlap, not work. An allreduce through shared memory consists almost
entirely of work, as its CPU time shows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

import unisono as un
from unisono.bench import argument_types
from unisono.bench.sizes import format_size, parse_sizes

_COLUMNS = ("compute_ms", "allreduce_ms", "allreduce_cpu_ms", "overlapped_ms", "ratio", "start_us")
_WARM_UPS = 5
_PASS_ELEMENTS = 4096


def main() -> None:
    """Measure how far calls overlap with computing, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", "--ranks", type=argument_types.count, default=2)
    parser.add_argument("--sizes", default="64K,1M,16M")
    parser.add_argument("--rounds", type=argument_types.count, default=30)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = measure(options.ranks, parse_sizes(options.sizes), options.rounds, options.transport)
    if options.json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return
    sys.stdout.write("".join(f"{name:>18}" for name in ("nbytes", *_COLUMNS)) + "\n")
    for row in rows:
        numbers = "".join(f"{row[name]:>18.3f}" for name in _COLUMNS)
        sys.stdout.write(f"{format_size(row['nbytes']):>18}{numbers}\n")


def measure(ranks: int, sizes: tuple[int, ...], rounds: int, transport: str = "auto") -> list[dict[str, Any]]:
    """Return a row for each size with the times of the slowest rank, as medians over `rounds`.

    `ratio` is the time of both at once divided by that of one after the other: 1 means no gain, 0.5 is the best.
    `start_us` is the time that ``wait=False`` takes to return.
    """
    results = un.launch(_measure_rank, ranks, sizes, rounds, options=un.Options(transports=transport))
    rows = []
    for of_ranks in zip(*results, strict=True):
        row: dict[str, Any] = {name: max(one[name] for one in of_ranks) for name in of_ranks[0]}
        row["ratio"] = row["overlapped_ms"] / (row["compute_ms"] + row["allreduce_ms"])
        rows.append({"ranks": ranks, **row})
    return rows


def _measure_rank(world: un.Communicator, sizes: tuple[int, ...], rounds: int) -> list[dict[str, float]]:
    return [_measure_size(world, nbytes, rounds) for nbytes in sizes]


def _measure_size(world: un.Communicator, nbytes: int, rounds: int) -> dict[str, float]:
    x = np.ones(max(1, nbytes // 4), np.float32)
    out = np.empty_like(x)
    started: list[float] = []

    def reduce() -> None:
        world.allreduce(x, out=out)

    _times(world, reduce, _WARM_UPS)
    alone = _times(world, reduce, rounds)
    compute = _computing(world, median(wall for wall, _ in alone))

    def both() -> None:
        began = time.perf_counter()
        work = world.allreduce(x, out=out, wait=False)
        started.append(time.perf_counter() - began)
        compute()
        work.wait()

    _times(world, both, _WARM_UPS)
    started.clear()
    overlapped = _times(world, both, rounds)
    return {
        "nbytes": nbytes,
        "compute_ms": median(wall for wall, _ in _times(world, compute, rounds)) * 1e3,
        "allreduce_ms": median(wall for wall, _ in alone) * 1e3,
        "allreduce_cpu_ms": median(cpu for _, cpu in alone) * 1e3,
        "overlapped_ms": median(wall for wall, _ in overlapped) * 1e3,
        "start_us": median(started) * 1e6,
    }


def _computing(world: un.Communicator, seconds: float) -> Callable[[], None]:
    """Return a function that computes for about `seconds` on one core, equally much on every rank."""
    values = np.linspace(0.0, 1.0, _PASS_ELEMENTS)
    result = np.empty_like(values)

    def compute(passes: int) -> None:
        for _ in range(passes):
            np.sin(values, out=result)

    trial = 100
    per_pass = median(wall for wall, _ in _times(world, lambda: compute(trial), _WARM_UPS)) / trial
    agreed = world.allreduce(np.array([seconds / per_pass]), "avg")
    passes = max(1, round(float(agreed[0])))
    return lambda: compute(passes)


def _times(world: un.Communicator, call: Callable[[], None], rounds: int) -> list[tuple[float, float]]:
    """Return the seconds of each call, and the CPU seconds of all threads of this process during it."""
    taken = []
    for _ in range(rounds):
        world.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        taken.append((time.perf_counter() - wall, time.process_time() - cpu))
    return taken


if __name__ == "__main__":
    main()
