"""Measures calls of torch.distributed over Unisono and Gloo: ``unisono bench torch_calls [-n 2] [--json]``.

Both backends are groups of the same processes. Their calls alternate in rounds, so changes of the machine's speed meet
both alike. A time is the median over rounds of a call's mean in a round, on the slower rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

import unisono as un
from unisono.bench import argument_types

BACKENDS = ("gloo", "unisono")
# A round takes about this long over each backend.
_ROUND_S = 0.02
_WARM_UPS = 5


def main() -> None:
    """Measure the calls, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", "--ranks", type=argument_types.count, default=2)
    parser.add_argument("--rounds", type=argument_types.count, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    version, rows = measure(options.ranks, options.rounds)
    if options.json:
        sys.stdout.write(json.dumps({"torch": version, "ranks": options.ranks, "rows": rows}, indent=1) + "\n")
        return
    table = Table("call", "Gloo, µs", "Unisono, µs", "times as fast", title=f"torch {version}, {options.ranks} ranks")
    for name, times in rows.items():
        ratio = times["gloo"] / times["unisono"]
        table.add_row(name, f"{times['gloo']:,.1f}", f"{times['unisono']:,.1f}", f"{ratio:.1f}")
    Console().print(table)


def measure(ranks: int, rounds: int) -> tuple[str, dict[str, dict[str, float]]]:
    """Return the version of torch, and for each call its time over each backend in microseconds."""
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        results = un.launch(_measure_rank, ranks, f"file://{folder}/meeting", rounds)
    (version, rows), *others = results
    for _, row in others:
        for name, times in row.items():
            rows[name] = {backend: max(rows[name][backend], times[backend]) for backend in BACKENDS}
    return version, rows


def _measure_rank(world: un.Communicator, url: str, rounds: int) -> tuple[str, dict[str, dict[str, float]]]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.size))
    dist.init_process_group("gloo", init_method=url, rank=world.rank, world_size=world.size)
    groups = {backend: dist.new_group(list(range(world.size)), backend=backend) for backend in BACKENDS}
    times = {}
    for name, call in _calls(world.size).items():
        calls: dict[str, Callable[[], object]] = {backend: partial(call, group) for backend, group in groups.items()}
        times[name] = _alternate(calls, world, rounds)
    dist.destroy_process_group()
    return str(torch.__version__), times


def _calls(size: int) -> dict[str, Callable[[Any], object]]:
    """Return the calls by name; each takes a group."""
    import torch
    import torch.distributed as dist

    def reduce(dtype: Any, nbytes: int) -> Callable[[Any], object]:
        x = torch.ones(nbytes // dtype.itemsize, dtype=dtype)
        return lambda group: dist.all_reduce(x, group=group)

    def reduce_async(group: Any) -> None:
        dist.all_reduce(short, group=group, async_op=True).wait()

    short = torch.ones(2)
    # The names since torch 2.13, or else the older ones.
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    whole, part = torch.ones(16 << 20), torch.ones((16 << 20) // size)
    return {
        "all_reduce, 8 B": reduce(torch.float32, 8),
        "all_reduce, 8 B, async_op and wait": reduce_async,
        "all_reduce, 8 KiB of bfloat16": reduce(torch.bfloat16, 8 << 10),
        "all_reduce, 64 KiB of bfloat16": reduce(torch.bfloat16, 64 << 10),
        "all_reduce, 1 MiB of bfloat16": reduce(torch.bfloat16, 1 << 20),
        "all_reduce, 8 MiB of bfloat16": reduce(torch.bfloat16, 8 << 20),
        "all_reduce, 32 MiB of bfloat16": reduce(torch.bfloat16, 32 << 20),
        "all_reduce, 1 MiB": reduce(torch.float32, 1 << 20),
        "all_reduce, 64 MiB": reduce(torch.float32, 64 << 20),
        "all_reduce, 64 MiB of bfloat16": reduce(torch.bfloat16, 64 << 20),
        "reduce_scatter_single, 64 MiB": lambda group: scatter(part, whole, group=group),
        "all_gather_single, 64 MiB": lambda group: gather(whole, part, group=group),
        "barrier": lambda group: dist.barrier(group=group),
    }


def _alternate(calls: dict[str, Callable[[], object]], world: un.Communicator, rounds: int) -> dict[str, float]:
    """Return the median time of each call in microseconds, after measuring the calls in turns."""
    repeats = {}
    for backend, call in calls.items():
        for _ in range(_WARM_UPS):
            began = time.perf_counter()
            call()
        took = max(world.allgather_object(time.perf_counter() - began))
        repeats[backend] = max(1, min(1000, round(_ROUND_S / took)))
    times: dict[str, list[float]] = {backend: [] for backend in calls}
    for _ in range(rounds):
        for backend, call in calls.items():
            world.barrier()
            began = time.perf_counter()
            for _ in range(repeats[backend]):
                call()
            times[backend].append((time.perf_counter() - began) / repeats[backend] * 1e6)
    return {backend: median(values) for backend, values in times.items()}


if __name__ == "__main__":
    main()
