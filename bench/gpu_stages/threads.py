"""Measures allreduce among threads of one process on one GPU, which consists only of our kernels and copies."""

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
FEWEST = 5  # the least number of measured calls
MOVED_NBYTES = 8 << 30  # the input of all ranks over all calls, if that makes more calls
ALGORITHMS = ("one_shot", "two_shot")
MOST_ONE_SHOT_NBYTES = 16 << 20  # beyond this size it is too slow to be chosen
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
        """Write the rank's number into every element."""
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
        """Return the error of the result of one call on filled arrays; empty if it is right."""
        got = self.gpu.fetch(self._array, min(1 << 16, nbytes // DTYPE.itemsize))
        expected = self.size * (self.size + 1) / 2
        return "" if (got == expected).all() else f"an element is {got[got != expected][0]} and must be {expected}"

    def close(self) -> None:
        """Close the collectives of this rank."""
        self._collectives.close(TIMEOUT_S)


def times_of(
    rank: Rank, barrier: threading.Barrier, nbytes: int, algorithm: str, calls: int
) -> tuple[list[float], str]:
    """Return the seconds of each call on this rank, and the error of the first one."""
    rank.fill()
    rank.allreduce(nbytes, algorithm)
    wrong = rank.check(nbytes)
    times = []
    for _ in range(calls):
        barrier.wait(TIMEOUT_S)
        started = time.perf_counter()
        rank.allreduce(nbytes, algorithm)
        times.append(time.perf_counter() - started)
    return times, wrong


def measure(pool: ThreadPoolExecutor, ranks: Sequence[Rank], nbytes: int, algorithm: str, most: int) -> None:
    """Measure one size on all ranks, with at most `most` calls, and print the median of the slowest rank."""
    barrier = threading.Barrier(len(ranks))
    calls = min(most, max(FEWEST, MOVED_NBYTES // (nbytes * len(ranks))))
    results = list(pool.map(lambda rank: times_of(rank, barrier, nbytes, algorithm, calls), ranks))
    times, wrong = [times for times, _ in results], next((wrong for _, wrong in results if wrong), "")
    middle = statistics.median(map(max, zip(*times, strict=True)))
    about = {"placement": "threads", "ranks": len(ranks), "library": f"unisono {algorithm}", "nbytes": nbytes}
    if wrong:
        tell("allreduce", **about, failure=f"wrong result: {wrong}")
    else:
        tell("allreduce", **about, median_us=middle * 1e6, calls=len(times[0]))


def main() -> int:
    """Run the measurement that the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=parse_sizes, default=parse_sizes("1K:1G:16,16M,256M"))
    parser.add_argument("--calls", type=int, default=100)
    options = parser.parse_args()
    executors = [GenericExecutor(transport) for transport in LocalNetwork(options.ranks).transports]
    with ThreadPoolExecutor(options.ranks) as pool:
        ranks = list(pool.map(lambda executor: Rank(executor, max(options.sizes)), executors))
        for nbytes in options.sizes:
            for algorithm in ALGORITHMS:
                if algorithm == "two_shot" or nbytes <= MOST_ONE_SHOT_NBYTES:
                    measure(pool, ranks, nbytes, algorithm, options.calls)
        list(pool.map(Rank.close, ranks))
    for executor in executors:
        executor.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
