"""Lets NCCL carry out calls of a rank that is alone: it meets, issues and ends, which NCCL of every version can.

The times are those of a copy, so they compare with nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import numpy as np

import unisono as un
from unisono.algorithms.catalogue.vendors import NCCL_NATIVE
from unisono.bench.gpu_stages.gpu import MeasuredGpu
from unisono.bench.gpu_stages.results.records import reason_of, tell
from unisono.bench.sizes import parse_sizes

TIMEOUT_S = 18.0
CALLS = 5


def times_of(world: un.Communicator, sizes: Sequence[int]) -> list[float]:
    """Return the least seconds of a call for each size, until the device is done; raises if a result is wrong."""
    gpu, least_s = MeasuredGpu(), []
    for nbytes in sizes:
        source, target = (gpu.empty(nbytes // 4, np.dtype(np.float32)) for _ in range(2))
        gpu.fill(source, np.arange(1024, dtype=np.float32))
        times = []
        for _ in range(CALLS):
            started = time.perf_counter()
            world.allreduce(source, out=target, algorithm=NCCL_NATIVE, timeout_s=TIMEOUT_S)
            gpu.synchronize()
            times.append(time.perf_counter() - started)
        if not np.array_equal(gpu.fetch(source), gpu.fetch(target)):
            raise AssertionError(f"a sum of {nbytes} bytes over one rank differs from its input")
        least_s.append(min(times))
    return least_s


def main() -> int:
    """Make the calls that the command line asks for, and print a record of each size; fail if NCCL cannot be used."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=parse_sizes, default=parse_sizes("1K,1M,64M"))
    options = parser.parse_args()
    about = {"placement": "alone", "ranks": 1, "library": NCCL_NATIVE}
    try:
        (times,) = un.launch(times_of, 1, options.sizes, timeout_s=TIMEOUT_S)
    except un.UnisonoError as error:
        tell("allreduce", **about, nbytes=options.sizes[0], failure=reason_of(error))
        return 0 if isinstance(error, un.TransportUnavailableError) else 1
    for nbytes, seconds in zip(options.sizes, times, strict=True):
        tell("allreduce", **about, nbytes=nbytes, median_us=seconds * 1e6)
    return 0


if __name__ == "__main__":
    sys.exit(main())
