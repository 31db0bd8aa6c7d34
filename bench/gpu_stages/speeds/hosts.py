"""Measures an allreduce among ranks that count as those of two hosts, beside one that is staged.

All of them are on this machine, and data that leaves a "host" goes over its shared memory. So it shows the cost of the
phases on GPUs, and not the effect of a network.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np

import unisono as un
from unisono.bench.gpu_stages.gpu import MeasuredGpu
from unisono.bench.gpu_stages.results.records import tell
from unisono.bench.sizes import parse_sizes
from unisono.collectives.calls.planning import HostLayout

TIMEOUT_S = 40.0
PLACEMENT = "two hosts"
TRANSPORTS = {"unisono": "cuda_ipc,shm", "unisono staged": "shm"}


def on_hosts(world: un.Communicator, hosts: Sequence[Sequence[int]]) -> un.Communicator:
    """Return a communicator of all ranks, which count as those of several hosts."""
    layout = HostLayout(tuple(map(tuple, hosts)), "tcp", near="shm")
    return world._child(world._executor.subgroup(range(world.size)), layout, world._options)


def times_of(world: un.Communicator, sizes: Sequence[int], rounds: int) -> list[float]:
    """Return the median time of a call on the slowest rank until the device has done it, for each size, in seconds."""
    half = world.size // 2
    gpu, medians = MeasuredGpu(), []
    with on_hosts(world, [range(half), range(half, world.size)]) as comm:
        for nbytes in sizes:
            x = gpu.empty(nbytes // 4, np.dtype(np.float32))
            gpu.fill(x, np.zeros(1024, np.float32))
            own = []
            for _ in range(rounds + 1):
                world.barrier()
                started = time.perf_counter()
                comm.allreduce(x, out=x, wait=False).synchronize(TIMEOUT_S)
                own.append(time.perf_counter() - started)
            slowest = np.max(world.allgather_object(own[1:]), axis=0)
            medians.append(statistics.median(slowest.tolist()))
            gpu.free(x)
    return medians


def main() -> int:
    """Run the measurement that the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sizes", type=parse_sizes, default=parse_sizes("64K,1M,16M,128M"))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    for library, transports in TRANSPORTS.items():
        chosen = un.Options(transports=transports)
        arguments = (options.sizes, options.rounds)
        times = un.launch(times_of, options.ranks, *arguments, options=chosen, timeout_s=TIMEOUT_S)[0]
        for nbytes, seconds in zip(options.sizes, times, strict=True):
            about = {"placement": PLACEMENT, "ranks": options.ranks, "nbytes": nbytes}
            tell("allreduce", **about, library=library, median_us=seconds * 1e6)
    return 0


if __name__ == "__main__":
    sys.exit(main())
