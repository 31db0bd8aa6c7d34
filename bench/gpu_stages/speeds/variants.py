"""Measures variants of the reduction kernels (`kernels.catalogue.VARIANTS`) in grids of several sizes.

A grid has at most as many blocks as the device runs at a time (1 wave), several waves of them, or one block for each
tile that a block loads at a time. Records say which variant is kept, so that a faster one can take its place.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from unisono.bench.gpu_stages.gpu import FLUSH_NBYTES, STREAM, DeviceClock, MeasuredGpu
from unisono.bench.gpu_stages.results.records import reason_of, tell
from unisono.bench.gpu_stages.speeds.kernels import PATTERN, REPETITIONS, Stack
from unisono.bench.sizes import parse_sizes
from unisono.dtypes import DTYPES
from unisono.operations import OPERATIONS
from unisono.transports.cuda.driver_api.errors import Driver
from unisono.transports.cuda.kernels.cache import built, user_cache
from unisono.transports.cuda.kernels.catalogue import Kernel, reduction
from unisono.transports.cuda.kernels.compiler import target_for
from unisono.transports.cuda.kernels.launcher import as_number, as_pointer, as_pointers
from unisono.transports.reductions.definition import numpy_dtype

# The variants that can be faster, by operation.
OF_OPS = {
    "sum": ("plain", "cache hints", "pipelined", "whole waves", "small blocks"),
    "avg": ("plain", "reciprocals", "pipelined", "pipelined reciprocals"),
}
DIVISOR = 2
# Waves of blocks; 0 stands for one block for each tile.
WAVES = (1, 2, 4, 0)
PACK_NBYTES = 16
PACKS_OF_TILE = 8
ATTRIBUTES = ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MULTIPROCESSOR_COUNT")


class Variants:
    """Compiles and launches variants of kernels. The context of the clock is current during each call."""

    def __init__(self) -> None:
        self._driver = driver = Driver()
        known = driver.api.CUdevice_attribute
        major, minor, self._multiprocessors = (
            driver("cuDeviceGetAttribute", getattr(known, f"CU_DEVICE_ATTRIBUTE_{name}"), 0) for name in ATTRIBUTES
        )
        self._target, self._folder = target_for((major, minor)), user_cache(os.environ)

    def built(self, kernel: Kernel) -> bytes:
        """Return a kernel compiled for the device; several threads may call it."""
        return built(kernel, self._target, self._folder)

    def loaded(self, kernel: Kernel) -> tuple[Any, int]:
        """Return a kernel as a function of the device, and the number of blocks in a wave."""
        driver = self._driver
        function = driver("cuModuleGetFunction", driver("cuModuleLoadData", self.built(kernel)), kernel.name.encode())
        at_a_time = driver("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, kernel.threads, 0)
        return function, at_a_time * self._multiprocessors

    def launcher(self, stack: Stack, function: Any, threads: int, wave: int, waves: int) -> Callable[[], object]:
        """Return a function that launches a kernel in `waves` waves of `wave` blocks, each of `threads` threads."""
        packs = -(-stack.target.nbytes // PACK_NBYTES)
        tiles = -(-packs // (threads * PACKS_OF_TILE))
        blocks = tiles if not waves else min(-(-packs // threads), wave * waves)
        parameters = (
            *(as_pointer(stack.target.pointer), as_pointers([row.pointer for row in stack.rows])),
            *(as_number(stack.count), as_number(DIVISOR)),
        )
        values, types = zip(*parameters, strict=True)
        arguments = (function, blocks, 1, 1, threads, 1, 1, 0, int(STREAM), (values, types), 0)
        return lambda: self._driver("cuLaunchKernel", *arguments)


def measure(stack: Stack, clock: DeviceClock, variants: Variants, op: str, variant: str) -> None:
    """Measure a kernel in grids of each size, and print records."""
    kernel = reduction(stack.dtype, OPERATIONS[op], stack.k, variant)
    function, wave = variants.loaded(kernel)
    is_kept = kernel.macros == reduction(stack.dtype, OPERATIONS[op], stack.k).macros
    for waves in WAVES:
        about = {
            **{"dtype": stack.dtype.name, "op": op, "k": stack.k, "nbytes": stack.target.nbytes},
            **{"variant": variant, "waves": waves, "kept": is_kept and waves == 1},
        }
        try:
            issue = variants.launcher(stack, function, kernel.threads, wave, waves)
            clock.milliseconds(issue)
            middle = statistics.median(clock.milliseconds(issue) for _ in range(REPETITIONS))
        except Exception as error:  # noqa: BLE001  (a variant that cannot run)
            tell("variant", **about, failure=reason_of(error))
            continue
        moved = (stack.k + 1) * stack.target.nbytes
        wrong = stack.difference(OPERATIONS[op], DIVISOR)
        tell("variant", **about, gbps=moved / middle / 1e6, wrong=wrong)


def main() -> int:
    """Run the measurement that the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=parse_sizes, default=(256 << 20,))
    parser.add_argument("--dtypes", default="float32,bfloat16,float8_e4m3fn")
    parser.add_argument("--ops", default=",".join(OF_OPS))
    parser.add_argument("--sources", default="2,8")
    parser.add_argument("--flush", type=int, default=FLUSH_NBYTES)
    options = parser.parse_args()
    gpu, byte, (nbytes,) = MeasuredGpu(), np.dtype(np.uint8), options.size
    clock, sources = DeviceClock(gpu, options.flush), [int(k) for k in options.sources.split(",")]
    source, target = gpu.empty(max(sources) * nbytes, byte), gpu.empty(nbytes, byte)
    cases = [(op, k, variant) for op in options.ops.split(",") for k in sources for variant in OF_OPS[op]]
    with clock.current():
        variants = Variants()
        for dtype in options.dtypes.split(","):
            kernels = [reduction(DTYPES[dtype], OPERATIONS[op], k, variant) for op, k, variant in cases]
            with ThreadPoolExecutor() as threads:
                list(threads.map(variants.built, kernels))
            pattern = np.random.default_rng(0).standard_normal(PATTERN).astype(numpy_dtype(DTYPES[dtype]))
            gpu.fill(source, pattern)
            for op, k, variant in cases:
                measure(Stack(gpu, source, target, dtype, k, nbytes), clock, variants, op, variant)
    return 0


if __name__ == "__main__":
    sys.exit(main())
