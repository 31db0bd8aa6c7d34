"""Measures reductions of k arrays by our kernels, by other libraries, and the device's copy: bytes moved per second.

A reduction of k arrays reads k and writes one, so it moves (k + 1) · n bytes; a copy moves 2 · n. All contenders take
turns on the same memory, a stack of k arrays. Each time is a median, with the L2 cache emptied before each run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from unisono.bench.gpu_stages.gpu import FLUSH_NBYTES, DeviceClock, GpuVector, MeasuredGpu, windows
from unisono.bench.gpu_stages.results.records import reason_of, tell
from unisono.bench.sizes import parse_sizes
from unisono.dtypes import DTYPES
from unisono.operations import OPERATIONS, Op
from unisono.transports.cuda.driver_api.errors import Driver
from unisono.transports.cuda.kernels.cache import built, user_cache
from unisono.transports.cuda.kernels.catalogue import reduction
from unisono.transports.cuda.kernels.compiler import target_for
from unisono.transports.reductions.definition import numpy_dtype, reduce_into

SUM = OPERATIONS["sum"]
REPETITIONS = 9
PATTERN = 12_345  # the elements after which contents repeat

Issue = Callable[[], object]


class Stack:
    """The arrays of a reduction: `k` arrays of `nbytes` each, one after the other, and the array for the result."""

    def __init__(self, gpu: MeasuredGpu, source: GpuVector, target: GpuVector, dtype: str, k: int, nbytes: int) -> None:
        self.gpu, self.dtype, self.k = gpu, DTYPES[dtype], k
        element = numpy_dtype(self.dtype)
        self.count = nbytes // element.itemsize
        self.rows = [GpuVector(source.pointer + i * nbytes, self.count, element) for i in range(k)]
        self.whole = GpuVector(source.pointer, k * self.count, element)
        self.target = GpuVector(target.pointer, self.count, element)

    def difference(self, op: Op = SUM, divisor: int = 1) -> str:
        """Return the first difference between the result and the definition in the compared windows, or ""."""
        for window in windows(self.count):
            rows = [self.gpu.fetch(row.part(window)) for row in self.rows]
            expected, result = np.empty_like(rows[0]), self.gpu.fetch(self.target.part(window))
            reduce_into(expected, rows, op, divisor, lower=True)
            wrong = np.flatnonzero(expected.view(np.uint8) != result.view(np.uint8))
            if wrong.size:
                return f"byte {wrong[0]} from element {window.start} on differs, and {wrong.size - 1} more"
        return ""


def ours(stack: Stack) -> Issue:
    """Return the reduction by our kernel."""
    pointers = [row.pointer for row in stack.rows]
    arguments = (stack.target.pointer, pointers, stack.count, stack.dtype, SUM, 1, 1)
    return lambda: stack.gpu.device.reduce(*arguments)  # type: ignore[arg-type]


def copy(stack: Stack) -> Issue:
    """Return a copy of one array, which shows the bandwidth of the memory."""
    target, row = stack.target, stack.rows[0]
    return lambda: stack.gpu.device.copy(target.pointer, row.pointer, row.nbytes, 1)  # type: ignore[arg-type]


def torch_sum(stack: Stack) -> Issue:
    """Return torch's sum of the stack over its first dimension, into existing memory."""
    torch, rows, out = _tensors(stack)
    return lambda: torch.sum(rows, dim=0, out=out)


def torch_chain(stack: Stack) -> Issue:
    """Return torch's additions of one array after the other."""
    torch, rows, out = _tensors(stack)

    def issue() -> None:
        torch.add(rows[0], rows[1], out=out)
        for row in rows[2:]:
            out.add_(row)

    return issue


def cupy_elementwise(stack: Stack) -> Issue:
    """Return a kernel that CuPy makes for k arrays."""
    import cupy

    arrays = [cupy.asarray(row) for row in (*stack.rows, stack.target)]
    names = [f"x{i}" for i in range(stack.k)]
    kernel = cupy.ElementwiseKernel(", ".join(f"T {name}" for name in names), "T y", f"y = {' + '.join(names)}", "sum")
    return lambda: kernel(*arrays)


def _tensors(stack: Stack) -> tuple[Any, Any, Any]:
    import torch

    as_dtype = getattr(torch, stack.dtype.name)
    raw = [
        torch.as_tensor(GpuVector(v.pointer, v.nbytes, np.dtype(np.uint8)), device="cuda")
        for v in (stack.whole, stack.target)
    ]
    whole, out = (tensor.view(as_dtype) for tensor in raw)
    return torch, whole.view(stack.k, stack.count), out


CONTENDERS: dict[str, Callable[[Stack], Issue]] = {
    "copy": copy,
    "unisono": ours,
    "torch.sum": torch_sum,
    "CuPy": cupy_elementwise,
    "torch adds": torch_chain,
}


def measure(stack: Stack, clock: DeviceClock) -> None:
    """Measure all contenders in turns, and print records."""
    ready: dict[str, Issue] = {}
    about = {"dtype": stack.dtype.name, "k": stack.k, "nbytes": stack.target.nbytes}
    for name, make in CONTENDERS.items():
        try:
            ready[name] = make(stack)
            clock.milliseconds(ready[name])
        except Exception as error:  # noqa: BLE001  (any failure of a library)
            ready.pop(name, None)
            tell("kernel", **about, contender=name, failure=reason_of(error))
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(REPETITIONS):
        for name, issue in ready.items():
            times[name].append(clock.milliseconds(issue))
    if "unisono" in ready:
        ready["unisono"]()
        about["wrong"] = stack.difference()
    for name, measured in times.items():
        moved = (2 if name == "copy" else stack.k + 1) * stack.target.nbytes
        middle = statistics.median(measured)
        tell("kernel", **about, contender=name, ms=middle, gbps=moved / middle / 1e6)


def compile_all(dtypes: Sequence[str], sources: Sequence[int]) -> None:
    """Compile all kernels that will be needed, several at a time."""
    driver = Driver()
    attributes = driver.api.CUdevice_attribute
    major, minor = (
        driver("cuDeviceGetAttribute", getattr(attributes, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{part}"), 0)
        for part in ("MAJOR", "MINOR")
    )
    target, folder = target_for((major, minor)), user_cache(os.environ)
    kernels = [reduction(DTYPES[dtype], SUM, k) for dtype in dtypes for k in sources]
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda kernel: built(kernel, target, folder), kernels))


def main() -> int:
    """Run the measurement that the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=parse_sizes, default=(256 << 20, 1 << 30))
    parser.add_argument("--dtypes", default="float32,bfloat16,float16,float8_e4m3fn")
    parser.add_argument("--sources", default="2,3,4,5,6,7,8")
    parser.add_argument("--flush", type=int, default=FLUSH_NBYTES)
    options = parser.parse_args()
    dtypes, sources = options.dtypes.split(","), [int(k) for k in options.sources.split(",")]
    compile_all(dtypes, sources)
    gpu, byte = MeasuredGpu(), np.dtype(np.uint8)
    clock = DeviceClock(gpu, options.flush)
    source, target = (gpu.empty(n * max(options.sizes), byte) for n in (max(sources), 1))
    for dtype in dtypes:
        pattern = np.random.default_rng(0).standard_normal(PATTERN).astype(numpy_dtype(DTYPES[dtype]))
        gpu.fill(source, pattern)
        for nbytes in options.sizes:
            for k in sources:
                measure(Stack(gpu, source, target, dtype, k, nbytes), clock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
