"""Runs each kind of kernel under compute-sanitizer: arrays of odd lengths, at odd addresses, and not aligned alike.

Each array has memory of its own, at whose end it ends. So memcheck sees an access beyond an array, which it could not
see if other arrays followed there. initcheck sees reads of bytes that nobody has written, and synccheck sees exchanges
between threads in which some take no part. No kernel uses shared memory, so racecheck would see nothing.
"""

from __future__ import annotations

import argparse
import glob
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the name bfloat16)
import numpy as np

from unisono.bench.gpu_stages.gpu import STREAM, DeviceClock, GpuVector, MeasuredGpu
from unisono.bench.gpu_stages.results.records import tell
from unisono.dtypes import DTYPES
from unisono.foundation.program import begin
from unisono.operations import OPERATIONS, Op
from unisono.testing.quantisation import dequantised, with_feedback
from unisono.transports.cuda.device import DeviceCopy
from unisono.transports.cuda.driver_api.errors import Driver
from unisono.transports.cuda.kernels.quantised_form import quantised_nbytes
from unisono.transports.reductions.definition import lift, reduce_into

NAME = "compute-sanitizer"
TOOLS = ("memcheck", "initcheck", "synccheck")
PLACES = ("/usr/local/cuda*/bin", f"{sys.prefix}/lib/python*/site-packages/nvidia/*/bin")
TIMEOUT_S = 25.0
FAILED = 9
FLOAT32, SUM = DTYPES["float32"], OPERATIONS["sum"]
# The elements by which the result and the sources begin behind a multiple of 16 bytes.
SHIFTS = ((0, 0), (1, 1), (3, 3), (0, 1), (2, 1))
FORMS = ("int8", "bfloat16")
FACTOR = 0.5
PLAIN = "none"


def program() -> str | None:
    """Return the path of compute-sanitizer, or None."""
    nearby = [path for place in PLACES for path in sorted(glob.glob(f"{place}/{NAME}"))]
    return shutil.which(NAME) or next(iter(nearby), None)


def run_under(tool: str, arguments: list[str]) -> None:
    """Run the kernels under a tool, and print the outcome."""
    path = program()
    under = [] if tool == PLAIN else [str(path), "--tool", tool, "--error-exitcode", str(FAILED)]
    if tool != PLAIN and path is None:
        tell("sanitizer", tool=tool, failure=f"{NAME} is not installed")
        return
    command = [*under, sys.executable, "-m", "unisono.bench.gpu_stages.checks.sanitizer", "--tool", "", *arguments]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        tell("sanitizer", tool=tool, failure=f"not finished within {TIMEOUT_S:g} s")
        return
    lines = (ended.stdout + ended.stderr).strip().splitlines()
    tell("sanitizer", tool=tool, found="" if not ended.returncode else " | ".join(lines[-5:]))


class Arrays:
    """Arrays that end where their memory ends, all of which is written. The memory of a case ends with it."""

    def __init__(self) -> None:
        self.gpu = MeasuredGpu()
        self._driver, self._clock = Driver(), DeviceClock(self.gpu, 4096)
        self._memory: list[int] = []

    def place(self, values: Any, shift: int = 0) -> GpuVector:
        """Return a copy of `values` on the device, `shift` elements behind the start of its allocation."""
        head = shift * values.itemsize
        with self._clock.current():
            memory = int(self._driver("cuMemAlloc", head + values.nbytes))
        self._memory.append(memory)
        self.gpu.fill(GpuVector(memory, head + values.nbytes, np.dtype(np.uint8)), np.zeros(64, np.uint8))
        vector = GpuVector(memory + head, values.size, values.dtype)
        self.gpu.fill(vector, values)
        return vector

    def free(self) -> None:
        """Free the memory of all arrays, which the device has finished using."""
        with self._clock.current():
            for memory in self._memory:
                self._driver("cuMemFree", memory)
        self._memory.clear()


def reductions(arrays: Arrays, values: Any, sources: Sequence[int]) -> Iterator[str]:
    """Yield an error text for each wrong sum of arrays, at all offsets from aligned addresses."""
    for k in sources:
        rows = [values + i for i in range(k)]
        expected = np.empty_like(values)
        reduce_into(expected, rows, SUM, 1, lower=True)
        for of_result, of_sources in SHIFTS:
            places = [arrays.place(row, of_sources).pointer for row in rows]
            result = arrays.place(np.zeros_like(values), of_result)
            arrays.gpu.device.reduce(result.pointer, places, values.size, FLOAT32, SUM, 1, STREAM)
            if not np.array_equal(arrays.gpu.fetch(result), expected):
                yield f"the sum of {k} arrays, shifted by {of_result} and {of_sources}"


def scalings(arrays: Arrays, values: Any, sources: Sequence[int]) -> Iterator[str]:
    """Yield an error text for each wrong product of an array and a factor."""
    op = Op.premul_sum(FACTOR)
    for of_result, of_source in SHIFTS:
        source, result = arrays.place(values, of_source), arrays.place(np.zeros_like(values), of_result)
        arrays.gpu.device.lift(result.pointer, source.pointer, values.size, FLOAT32, op, STREAM)
        if not np.array_equal(arrays.gpu.fetch(result), lift(op, values)):
            yield f"a scaled array, shifted by {of_result} and {of_source}"


def extents(arrays: Arrays, values: Any, sources: Sequence[int]) -> Iterator[str]:
    """Yield an error text for each array of bytes that one kernel has copied wrongly."""
    raw = values.view(np.uint8)
    pairs = [
        (arrays.place(raw[: raw.size - i], i), arrays.place(np.zeros(raw.size - i, np.uint8), j))
        for i, j in ((0, 0), (1, 1), (3, 2))
    ]
    moved = [DeviceCopy(target.pointer, source.pointer, source.nbytes) for source, target in pairs]
    arrays.gpu.device.copy_extents(moved, STREAM)
    for source, target in pairs:
        if not np.array_equal(arrays.gpu.fetch(target), raw[: source.nbytes]):
            yield f"a copied extent of {source.nbytes} bytes"


def quantisations(arrays: Arrays, values: Any, sources: Sequence[int]) -> Iterator[str]:
    """Yield an error text for each array that was quantised wrongly, and for each wrong sum of codes."""
    count, device = values.size, arrays.gpu.device
    for form in FORMS:
        codes, kept = DTYPES[form], np.zeros(count, np.float32)
        nbytes = quantised_nbytes(codes, count)
        wire = arrays.place(np.zeros(2 * nbytes, np.uint8))
        residual, source = arrays.place(kept), arrays.place(values)
        total = np.zeros(count, np.float32)
        for i in range(2):
            device.quantise(wire.pointer + i * nbytes, source.pointer, residual.pointer, count, FLOAT32, codes, STREAM)
            total += dequantised(with_feedback(values, kept, form))
        target = arrays.place(np.zeros_like(values))
        device.dequantise(target.pointer, wire.pointer, 2, count, FLOAT32, codes, 2, STREAM)
        if not np.array_equal(arrays.gpu.fetch(target), total / np.float32(2)):
            yield f"an array as {form}"


KINDS: tuple[Callable[[Arrays, Any, Sequence[int]], Iterator[str]], ...] = (
    *(reductions, scalings, extents),
    quantisations,
)


def run_all(counts: Sequence[int], sources: Sequence[int]) -> int:
    """Run all kinds of kernels on arrays of all counts; return 1 if a result is wrong."""
    arrays, generator = Arrays(), np.random.default_rng(0)
    for count in counts:
        values = generator.standard_normal(count).astype(np.float32)
        for kind in KINDS:
            for wrong in kind(arrays, values, sources):
                print(f"wrong: {wrong}, with {count} elements")  # noqa: T201
                return 1
            arrays.free()
    return 0


def main() -> int:
    """Run the kernels under each tool, or here if the tool is ""."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tool", help="the tool under which this process runs")
    parser.add_argument("--counts", default="1,100003")
    parser.add_argument("--sources", default="2,3,8")
    options = parser.parse_args()
    if options.tool is not None:
        return run_all(*([int(number) for number in text.split(",")] for text in (options.counts, options.sources)))
    arguments = ["--counts", options.counts, "--sources", options.sources]
    run_under(PLAIN, arguments)  # alone, because it compiles the kernels for the others
    with ThreadPoolExecutor(len(TOOLS)) as threads:
        list(threads.map(lambda tool: run_under(tool, arguments), TOOLS))
    return 0


if __name__ == "__main__":
    begin()
    sys.exit(main())
