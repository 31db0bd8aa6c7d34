"""Measures allreduce among threads of one process on one GPU, which consists only of our kernels and copies.

The stage reports three times. The wall time of a call is that of the slowest rank, from a barrier until its device is
done. The host time is that until the call has been issued; the ranks are threads, so they share Python's lock. The
device time is measured by events around several calls: long copies on one rank hold up the others, so that all calls
are issued before the first one runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from unisono.bench.gpu_stages.gpu import DeviceClock, MeasuredGpu, windows
from unisono.bench.gpu_stages.results.records import tell
from unisono.bench.sizes import parse_sizes
from unisono.dtypes import DTYPES
from unisono.operations import OPERATIONS
from unisono.transports.contracts.call import Extent, Signature
from unisono.transports.cuda.driver_api.cuda_device import CudaDevice
from unisono.transports.cuda.peers.collectives import DeviceCollectives
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
CALLS_ON_DEVICE = 4  # the calls between two events of the device's clock
HELD_NBYTES = 256 << 20  # a copy of this size holds up the device
# The time for which it is held up, in multiples of the time that the host needs to issue the calls.
HELD_TIMES = 2.0


class Rank:
    """One thread's rank: its device, stream and array."""

    def __init__(self, executor: GenericExecutor, largest_nbytes: int, held_nbytes: int) -> None:
        self.gpu = MeasuredGpu()
        self.rank, self.size = executor.rank, executor.size
        self.device: CudaDevice = self.gpu.device
        self._collectives = DeviceCollectives(executor, self.device, timeout_s=TIMEOUT_S, slab_nbytes=SLAB_NBYTES)
        if self._collectives.refusal:
            raise RuntimeError(self._collectives.refusal)
        self._stream, self._event = self.device.new_stream(), self.device.new_event()
        self._array = self.gpu.empty(largest_nbytes // DTYPE.itemsize, np.dtype(np.float32))
        self._clock = DeviceClock(self.gpu, held_nbytes) if self.rank == 0 else None

    def fill(self) -> None:
        """Write the rank's number into every element."""
        self.gpu.fill(self._array, np.full(1024, self.rank + 1, np.float32))

    def allreduce(self, nbytes: int, algorithm: str) -> float:
        """Reduce the first bytes of the arrays in place, and wait for the device; return the seconds until issued."""
        started = time.perf_counter()
        self.issue(nbytes, algorithm)
        issued = time.perf_counter()
        self.synchronize()
        return issued - started

    def issue(self, nbytes: int, algorithm: str) -> None:
        """Issue a reduction of the first bytes of the arrays."""
        count = nbytes // DTYPE.itemsize
        signature = Signature("allreduce", DTYPE.name, (count,), "C", "sum", None, algorithm, 1)
        extent = Extent((count, count), DTYPE, OPERATIONS["sum"])
        pointer = self._array.pointer
        self._collectives.start(signature, extent, pointer, pointer, self._stream, algorithm).wait(TIMEOUT_S)

    def synchronize(self) -> None:
        """Wait until the device has done all work that this rank has issued."""
        self.device.record(self._event, self._stream)
        while not self.device.done(self._event):
            time.sleep(0)

    def device_ms(self, nbytes: int, algorithm: str, held_ms: float) -> float:
        """Return the device's milliseconds for a call on the rank that holds up the device; 0 on other ranks."""

        def issue() -> None:
            for _ in range(CALLS_ON_DEVICE):
                self.issue(nbytes, algorithm)

        if self._clock is None:
            issue()
            self.synchronize()
            return 0.0
        return self._clock.milliseconds(issue, self._stream, held_ms) / CALLS_ON_DEVICE

    def check(self, nbytes: int) -> str:
        """Return the error of the result of one call on filled arrays; empty if it is right."""
        expected = self.size * (self.size + 1) / 2
        for window in windows(nbytes // DTYPE.itemsize):
            got = self.gpu.fetch(self._array.part(window))
            if (got != expected).any():
                return f"an element is {got[got != expected][0]} and must be {expected}"
        return ""

    def close(self) -> None:
        """Close the collectives of this rank."""
        self._collectives.close(TIMEOUT_S)


class ThreadTimes(NamedTuple):
    """The times of one rank: of each call, until it was issued, and on the device; and the error of the first call."""

    wall_s: list[float]
    host_s: list[float]
    device_ms: float
    wrong: str


def times_of(rank: Rank, barrier: threading.Barrier, nbytes: int, algorithm: str, calls: int) -> ThreadTimes:
    """Return the times of calls on this rank."""
    rank.fill()
    rank.allreduce(nbytes, algorithm)
    wrong, wall_s, host_s = rank.check(nbytes), [], []
    for _ in range(calls):
        barrier.wait(TIMEOUT_S)
        started = time.perf_counter()
        host_s.append(rank.allreduce(nbytes, algorithm))
        wall_s.append(time.perf_counter() - started)
    barrier.wait(TIMEOUT_S)
    held_ms = HELD_TIMES * CALLS_ON_DEVICE * statistics.median(host_s) * 1e3
    return ThreadTimes(wall_s, host_s, rank.device_ms(nbytes, algorithm, held_ms), wrong)


def measure(pool: ThreadPoolExecutor, ranks: Sequence[Rank], nbytes: int, algorithm: str, most: int) -> None:
    """Measure one size on all ranks, with at most `most` calls, and print the medians of the slowest rank."""
    barrier = threading.Barrier(len(ranks))
    calls = min(most, max(FEWEST, MOVED_NBYTES // (nbytes * len(ranks))))
    results = list(pool.map(lambda rank: times_of(rank, barrier, nbytes, algorithm, calls), ranks))
    wrong = next((times.wrong for times in results if times.wrong), "")
    about = {"placement": "threads", "ranks": len(ranks), "library": f"unisono {algorithm}", "nbytes": nbytes}
    if wrong:
        tell("allreduce", **about, failure=f"wrong result: {wrong}")
        return
    tell(
        "allreduce",
        **about,
        median_us=_slowest([times.wall_s for times in results]) * 1e6,
        host_us=_slowest([times.host_s for times in results]) * 1e6,
        device_us=max(times.device_ms for times in results) * 1e3,
        calls=calls,
    )


def _slowest(seconds: Sequence[Sequence[float]]) -> float:
    """Return the median over calls of the time of the slowest rank."""
    return float(statistics.median(map(max, zip(*seconds, strict=True))))


def main() -> int:
    """Run the measurement that the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=parse_sizes, default=parse_sizes("1K:1G:16,16M,256M"))
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--held", type=int, default=HELD_NBYTES, help="the bytes of a copy that holds up the device")
    options = parser.parse_args()
    executors = [GenericExecutor(transport) for transport in LocalNetwork(options.ranks).transports]
    with ThreadPoolExecutor(options.ranks) as pool:
        ranks = list(pool.map(lambda executor: Rank(executor, max(options.sizes), options.held), executors))
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
