"""Allreduce by ranks that are threads of one process, on one GPU: nothing but our kernels and copies is in the way."""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from unisono.bench.gpu_stages.gpu import Gpu
from unisono.bench.gpu_stages.records import tell
from unisono.bench.sizes import parse_sizes
from unisono.dtypes import DTYPES
from unisono.operations import OPERATIONS
from unisono.transports.contracts.call import Extent, Signature
from unisono.transports.cuda.driver import CudaDevice
from unisono.transports.cuda.ipc import DeviceCollectives
from unisono.transports.executors.generic import GenericExecutor
from unisono.transports.message.local import LocalNetwork

DTYPE = DTYPES["float32"]
TIMEOUT_S = 20.0
FEWEST = 5  # calls that are measured,
MOVED_NBYTES = 8 << 30  # and how much all ranks put in, where that makes more
ALGORITHMS = ("one_shot", "two_shot")
MOST_ONE_SHOT_NBYTES = 16 << 20  # beyond, it takes long and nobody would choose it
# Slabs as large as the largest array, so that a call is one piece.
SLAB_NBYTES = 1 << 30


class Rank:
    """One thread's rank: its device, stream and array."""

    def __init__(self, executor: GenericExecutor, largest_nbytes: int) -> None:
        self.gpu = Gpu()
        self.rank, self.size = executor.rank, executor.size
        self.device: CudaDevice = self.gpu.device
        self._collectives = DeviceCollectives(executor, self.device, timeout_s=TIMEOUT_S, slab_nbytes=SLAB_NBYTES)
        if self._collectives.refusal:
            raise RuntimeError(self._collectives.refusal)
        self._stream, self._event = self.device.new_stream(), self.device.new_event()
        self._array = self.gpu.empty(largest_nbytes // DTYPE.itemsize, np.dtype(np.float32))

    def fill(self) -> None:
        """Write the rank's number everywhere."""
        self.gpu.fill(self._array, np.full(1024, self.rank + 1, np.float32))

    def allreduce(self, nbytes: int, algorithm: str) -> None:
        """Reduce the first bytes of the arrays in place, and wait for the device."""
        count = nbytes // DTYPE.itemsize
        signature = Signature("allreduce", DTYPE.name, (count,), "C", "sum", None, algorithm, 1)
        extent = Extent((count, count), DTYPE, OPERATIONS["sum"])
        pointer = self._array.pointer
        self._collectives.start(signature, extent, pointer, pointer, self._stream, algorithm).wait(TIMEOUT_S)
        self.device.record(self._event, self._stream)
        while not self.device.done(self._event):
            time.sleep(0)

    def check(self, nbytes: int) -> str:
        """Return what is wrong after one call on filled arrays, or nothing."""
        got = self.gpu.fetch(self._array, min(1 << 16, nbytes // DTYPE.itemsize))
        wanted = self.size * (self.size + 1) / 2
        return "" if (got == wanted).all() else f"an element is {got[got != wanted][0]} and must be {wanted}"

    def close(self) -> None:
        """Leave the other ranks."""
        self._collectives.close(TIMEOUT_S)


def times_of(
    rank: Rank, barrier: threading.Barrier, nbytes: int, algorithm: str, calls: int
) -> tuple[list[float], str]:
    """Return the seconds of each call on this rank, and what is wrong with the first one."""
    rank.fill()
    rank.allreduce(nbytes, algorithm)
    wrong = rank.check(nbytes)
    found = []
    for _ in range(calls):
        barrier.wait(TIMEOUT_S)
        started = time.perf_counter()
        rank.allreduce(nbytes, algorithm)
        found.append(time.perf_counter() - started)
    return found, wrong


def measure(pool: ThreadPoolExecutor, ranks: Sequence[Rank], nbytes: int, algorithm: str, most: int) -> None:
    """Measure one size on all ranks, by at most so many calls, and tell the median of the slowest."""
    barrier = threading.Barrier(len(ranks))
    calls = min(most, max(FEWEST, MOVED_NBYTES // (nbytes * len(ranks))))
    found = list(pool.map(lambda rank: times_of(rank, barrier, nbytes, algorithm, calls), ranks))
    times, wrong = [times for times, _ in found], next((wrong for _, wrong in found if wrong), "")
    middle = statistics.median(map(max, zip(*times, strict=True)))
    about = {"placement": "threads", "ranks": len(ranks), "library": f"unisono {algorithm}", "nbytes": nbytes}
    if wrong:
        tell("allreduce", **about, failure=f"wrong result: {wrong}")
    else:
        tell("allreduce", **about, median_us=middle * 1e6, calls=len(times[0]))


def main() -> int:
    """Measure what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=parse_sizes, default=parse_sizes("1K:1G:16,16M,256M"))
    parser.add_argument("--calls", type=int, default=100)
    asked = parser.parse_args()
    executors = [GenericExecutor(transport) for transport in LocalNetwork(asked.ranks).transports]
    with ThreadPoolExecutor(asked.ranks) as pool:
        ranks = list(pool.map(lambda executor: Rank(executor, max(asked.sizes)), executors))
        for nbytes in asked.sizes:
            for algorithm in ALGORITHMS:
                if algorithm == "two_shot" or nbytes <= MOST_ONE_SHOT_NBYTES:
                    measure(pool, ranks, nbytes, algorithm, asked.calls)
        list(pool.map(Rank.close, ranks))
    for executor in executors:
        executor.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
