"""Measure an allreduce between the ranks of this job, from 8 bytes to 64 MiB.

    unisono run -n 2 --bind core examples/bandwidth.py

The time of a call is that of its slowest rank, and the table shows the median over calls. The bus bandwidth is defined
as in nccl-tests: 2 (p - 1) / p · bytes / time for p ranks. It does not depend on p if the links are the limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import unisono as un

SIZES = (*(8**exponent for exponent in range(1, 9)), 64 << 20)  # bytes
CALLS = (5, 500)  # the fewest and the most calls per size
SECONDS = 0.3  # per size


@dataclass(frozen=True)
class Timing:
    """The median time of an allreduce of `nbytes` bytes."""

    nbytes: int
    seconds: float
    ranks: int

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second, as nccl-tests define it."""
        return 2 * (self.ranks - 1) / self.ranks * self.nbytes / self.seconds


def measure(world: un.Communicator) -> list[Timing]:
    """Time the allreduce of float32 sums for all `SIZES`, and check the sums. All ranks return the same."""
    return [Timing(nbytes, time_allreduce(world, nbytes // 4), world.size) for nbytes in SIZES]


def time_allreduce(world: un.Communicator, count: int) -> float:
    """Return the seconds that the slowest rank needs, as the median over calls."""
    source = np.full(count, world.rank + 1, dtype=np.float32)
    result = np.empty_like(source)

    def call() -> None:
        world.allreduce(source, op="sum", out=result)

    call()
    if not np.all(result == sum(range(1, world.size + 1))):
        raise RuntimeError(f"the sum of {count} elements is wrong")
    guess = np.array([time_calls(call, 2, world.barrier)[-1]])
    seconds = float(world.allreduce(guess, op="max")[0])
    times = time_calls(call, int(np.clip(SECONDS / seconds, *CALLS)), world.barrier)
    return float(np.median(world.allreduce(times, op="max")))


def time_copy(nbytes: int) -> float:
    """Return the median seconds that numpy needs to copy `nbytes` bytes in this process."""
    source = np.ones(nbytes // 4, dtype=np.float32)
    result = np.empty_like(source)

    def call() -> None:
        np.copyto(result, source)

    seconds = time_calls(call, 3)[-1]
    return float(np.median(time_calls(call, int(np.clip(SECONDS / seconds, *CALLS)))))


def time_calls(call: Callable[[], None], calls: int, before: Callable[[], None] | None = None) -> NDArray[np.float64]:
    """Return the seconds of each call; `before` runs before each call and is not timed."""
    times = np.empty(calls)
    for index in range(calls):
        if before:
            before()
        started = time.perf_counter()
        call()
        times[index] = time.perf_counter() - started
    return times


def format_size(nbytes: float) -> str:
    """Return ``"8 B"``, ``"4 KiB"``, ``"64 MiB"``."""
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:g} {unit}"
    return f"{nbytes:g} B"


def format_time(seconds: float) -> str:
    """Return the time in microseconds with three digits, such as ``"1.25 µs"``."""
    micros = seconds * 1e6
    return f"{micros:,.{0 if micros >= 100 else 1 if micros >= 10 else 2}f} µs"


def main() -> None:
    """Measure, and show the table on rank 0."""
    with un.init() as world:
        timings = measure(world)
        if world.rank == 0:
            for timing in timings:
                bandwidth = timing.bus_bandwidth / 1e9
                print(f"{format_size(timing.nbytes):>8} {format_time(timing.seconds):>12} {bandwidth:8.3f} GB/s")


if __name__ == "__main__":
    main()
