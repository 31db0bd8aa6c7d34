"""Measures how long the host is busy until an allreduce among processes has been issued.

Calls are repeated on the same arrays. So programs issue them (`native_programs`), or Python if those are switched off.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial

import numpy as np

import unisono as un
from unisono.bench.gpu_stages.gpu import MeasuredGpu
from unisono.bench.gpu_stages.results.records import tell
from unisono.bench.sizes import parse_sizes
from unisono.transports.cuda.devices import replaced
from unisono.transports.cuda.driver_api.cuda_device import CudaDevice

TIMEOUT_S = 20.0
WAYS = {"programs": True, "Python": False}
WARM_UP = 10


def busy_us(world: un.Communicator, sizes: Sequence[int], native: bool, calls: int) -> list[float]:
    """Return the median processor time of this rank for a call, for each size, in microseconds."""
    medians = []
    with replaced(partial(CudaDevice, native=native)):
        gpu = MeasuredGpu()
        for nbytes in sizes:
            source, target = (gpu.empty(nbytes // 4, np.dtype(np.float32)) for _ in range(2))
            times = []
            for _ in range(WARM_UP + calls):
                started = time.thread_time()
                world.allreduce(source, out=target, algorithm="two_shot", timeout_s=TIMEOUT_S)
                times.append(time.thread_time() - started)
                gpu.synchronize()
            medians.append(statistics.median(times[WARM_UP:]) * 1e6)
            world.barrier()
    return medians


def main() -> int:
    """Run the measurement that the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=parse_sizes, default=parse_sizes("1K,1M,64M"))
    parser.add_argument("--calls", type=int, default=100)
    options = parser.parse_args()
    for way, native in WAYS.items():
        by_rank = un.launch(busy_us, options.ranks, options.sizes, native, options.calls, timeout_s=TIMEOUT_S)
        for nbytes, of_ranks in zip(options.sizes, zip(*by_rank, strict=True), strict=True):
            tell("issue", ranks=options.ranks, nbytes=nbytes, way=way, host_us=max(of_ranks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
