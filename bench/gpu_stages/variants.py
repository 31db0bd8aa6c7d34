"""Measures variants of the reduction kernels, so that the best ones can be kept: cache hints, and the size of the grid.

A grid has at most so many blocks as the device runs at a time (1 wave), several waves of them, or one block for each
tile that a block loads at a time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from unisono.bench.gpu_stages.gpu import FLUSH_NBYTES, STREAM, Clock, Gpu
from unisono.bench.gpu_stages.kernels import PATTERN, REPETITIONS, SUM, Stack
from unisono.bench.gpu_stages.records import reason_of, tell
from unisono.bench.sizes import parse_sizes
from unisono.dtypes import DTYPES
from unisono.transports.cuda.cache import built, user_cache
from unisono.transports.cuda.compiler import target_for
from unisono.transports.cuda.driver_errors import Driver
from unisono.transports.cuda.kernel_catalogue import BLOCK_THREADS, Kernel, reduction
from unisono.transports.cuda.kernel_launcher import as_number, as_pointer, as_pointers
from unisono.transports.reductions.definition import numpy_dtype

HINTS = {"plain": "", "cache hints": "#define UNISONO_CACHE_HINTS 1\n"}
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

    def loaded(self, stack: Stack, hints: str) -> tuple[Any, int]:
        """Return the kernel that reduces a stack, compiled with hints, and the number of blocks in a wave."""
        plain = reduction(stack.dtype, SUM, stack.k)
        code = built(Kernel(plain.name, HINTS[hints] + plain.source), self._target, self._folder)
        driver = self._driver
        function = driver("cuModuleGetFunction", driver("cuModuleLoadData", code), plain.name.encode())
        at_a_time = driver("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, BLOCK_THREADS, 0)
        return function, at_a_time * self._multiprocessors

    def launcher(self, stack: Stack, function: Any, wave: int, waves: int) -> Callable[[], object]:
        """Return a function that launches the kernel in so many waves."""
        packs = -(-stack.target.nbytes // PACK_NBYTES)
        tiles = -(-packs // (BLOCK_THREADS * PACKS_OF_TILE))
        blocks = tiles if not waves else min(-(-packs // BLOCK_THREADS), wave * waves)
        parameters = (
            *(as_pointer(stack.target.pointer), as_pointers([row.pointer for row in stack.rows])),
            *(as_number(stack.count), as_number(1)),
        )
        values, types = zip(*parameters, strict=True)
        arguments = (function, blocks, 1, 1, BLOCK_THREADS, 1, 1, 0, int(STREAM), (values, types), 0)
        return lambda: self._driver("cuLaunchKernel", *arguments)


def measure(stack: Stack, clock: Clock, variants: Variants, hints: str) -> None:
    """Measure a kernel in grids of each size, and print records."""
    function, wave = variants.loaded(stack, hints)
    for waves in WAVES:
        about = {"dtype": stack.dtype.name, "k": stack.k, "nbytes": stack.target.nbytes, "hints": hints, "waves": waves}
        try:
            issue = variants.launcher(stack, function, wave, waves)
            clock.milliseconds(issue)
            middle = statistics.median(clock.milliseconds(issue) for _ in range(REPETITIONS))
        except Exception as error:  # noqa: BLE001  (a variant that cannot run)
            tell("variant", **about, failure=reason_of(error))
            continue
        moved = (stack.k + 1) * stack.target.nbytes
        tell("variant", **about, gbps=moved / middle / 1e6, wrong=stack.difference())


def main() -> int:
    """Run the measurement that the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=parse_sizes, default=(256 << 20,))
    parser.add_argument("--dtypes", default="float32,bfloat16,float8_e4m3fn")
    parser.add_argument("--sources", default="2,8")
    parser.add_argument("--flush", type=int, default=FLUSH_NBYTES)
    options = parser.parse_args()
    gpu, byte, (nbytes,) = Gpu(), np.dtype(np.uint8), options.size
    clock, sources = Clock(gpu, options.flush), [int(k) for k in options.sources.split(",")]
    source, target = gpu.empty(max(sources) * nbytes, byte), gpu.empty(nbytes, byte)
    with clock.current():
        variants = Variants()
        for dtype in options.dtypes.split(","):
            pattern = np.random.default_rng(0).standard_normal(PATTERN).astype(numpy_dtype(DTYPES[dtype]))
            gpu.fill(source, pattern)
            for k in sources:
                for hints in HINTS:
                    measure(Stack(gpu, source, target, dtype, k, nbytes), clock, variants, hints)
    return 0


if __name__ == "__main__":
    sys.exit(main())
