"""Runs reductions under compute-sanitizer: arrays of odd lengths, at odd addresses, and not aligned alike."""

from __future__ import annotations

import argparse
import functools
import glob
import itertools
import shutil
import subprocess
import sys

import numpy as np

from unisono.bench.gpu_stages.gpu import STREAM, Gpu, Vector
from unisono.bench.gpu_stages.records import tell
from unisono.dtypes import DTYPES
from unisono.operations import OPERATIONS
from unisono.program import begin

NAME = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck")
PLACES = ("/usr/local/cuda*/bin", f"{sys.prefix}/lib/python*/site-packages/nvidia/*/bin")
TIMEOUT_S = 14.0
FAILED = 9
FLOAT32, SUM = DTYPES["float32"], OPERATIONS["sum"]
# The elements by which the result and the sources begin behind a multiple of 16 bytes.
SHIFTS = ((0, 0), (1, 1), (3, 3), (0, 1), (2, 1))
PLAIN = "none"


def program() -> str | None:
    """Return the path of compute-sanitizer, or None."""
    nearby = [path for place in PLACES for path in sorted(glob.glob(f"{place}/{NAME}"))]
    return shutil.which(NAME) or next(iter(nearby), None)


def run_under(tool: str, arguments: list[str]) -> None:
    """Run the reductions under a tool, and print the outcome."""
    path = program()
    under = [] if tool == PLAIN else [str(path), "--tool", tool, "--error-exitcode", str(FAILED)]
    if tool != PLAIN and path is None:
        tell("sanitizer", tool=tool, failure=f"{NAME} is not installed")
        return
    command = [*under, sys.executable, "-m", "unisono.bench.gpu_stages.sanitizer", "--tool", "", *arguments]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        tell("sanitizer", tool=tool, failure=f"not finished within {TIMEOUT_S:g} s")
        return
    lines = (ended.stdout + ended.stderr).strip().splitlines()
    tell("sanitizer", tool=tool, found="" if not ended.returncode else " | ".join(lines[-5:]))


def reduce_all(counts: list[int], sources: list[int]) -> int:
    """Reduce arrays of all counts at all shifts; return 1 if a result is wrong."""
    gpu, generator = Gpu(), np.random.default_rng(0)
    room = (max(counts) + 4) * FLOAT32.itemsize
    whole = gpu.empty((max(sources) + 1) * room, np.dtype(np.uint8))
    for k, count, (of_result, of_sources) in itertools.product(sources, counts, SHIFTS):
        rows = generator.standard_normal((k, count)).astype(np.float32)
        places = [Vector(whole.pointer + i * room + 4 * of_sources, count, rows.dtype) for i in range(k)]
        for place, row in zip(places, rows, strict=True):
            gpu.fill(place, row)
        result = Vector(whole.pointer + k * room + 4 * of_result, count, rows.dtype)
        gpu.device.reduce(result.pointer, [place.pointer for place in places], count, FLOAT32, SUM, 1, STREAM)
        if not np.array_equal(gpu.fetch(result), functools.reduce(np.add, rows)):
            print(f"wrong: {k} arrays of {count} elements, shifted by {of_result} and {of_sources}")  # noqa: T201
            return 1
    return 0


def main() -> int:
    """Run the reductions under each tool, or here if the tool is ""."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tool", help="the tool under which this process runs")
    parser.add_argument("--counts", default="1,100003")
    parser.add_argument("--sources", default="2,3,8")
    options = parser.parse_args()
    if options.tool is not None:
        return reduce_all(*([int(number) for number in text.split(",")] for text in (options.counts, options.sources)))
    for tool in (PLAIN, *TOOLS):
        run_under(tool, ["--counts", options.counts, "--sources", options.sources])
    return 0


if __name__ == "__main__":
    begin()
    sys.exit(main())
