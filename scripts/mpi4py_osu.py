"""Run mpi4py's OSU benchmarks over Unisono and over MPIs in turn, and print a table of ratios.

    python scripts/mpi4py_osu.py [--rounds 5] [--only latency bcast] [--sizes 8 1024] [--over openmpi mpich impi]

The benchmarks are `demo/osu_*.py` of mpi4py's source, unchanged, at 2 ranks on this host. In each round, every
benchmark runs over each library, one after the other and in random order, so that all meet the same load of the
machine. Each job runs its benchmark several times. A cell has the least time of Unisono divided by the least time of
the MPI: below 1, Unisono is faster. Least times, because a rank that waits for a core makes an average meaningless. A
bandwidth counts as the time of a byte. `make mpi` and `make peers PEERS=impi` make the environments of the MPIs.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from mpi4py_own_tests import MPIS as TESTED, ROOT, downloaded

from unisono.bench.peers import AS_ROOT, INTEL, ONE_THREAD

PROGRAM = ROOT / "tests" / "support" / "mpi4py_clients" / "osu.py"
INTEL_ROOT = ROOT / ".peers" / "impi"
OURS = "unisono"
# By label: the folder of the environment of an MPI, and the options of its mpiexec.
MPIS = {**TESTED, "impi": (INTEL_ROOT, ())}
VARIABLES = {
    "openmpi": AS_ROOT,
    "impi": {name: value.format(root=INTEL_ROOT) for name, value in INTEL.items()},
}
RUNS = 10  # of a benchmark in each job
BANDWIDTHS = {"bw", "bibw"}
BENCHMARKS = ("latency", "multi_lat", "bw", "bibw", "barrier", "bcast", "gather", "scatter", "allgather", "alltoall",
              "alltoallv")  # fmt: skip


def command(label: str, words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a benchmark."""
    environ = {**os.environ, **ONE_THREAD, **VARIABLES.get(label, {})}
    if label == OURS:
        return [sys.executable, "-m", "unisono", "run", "-n", "2", "--no-label", "--mpi4py", *words], environ
    place, options = MPIS[label]
    return [str(place / "bin" / "mpiexec"), "-n", "2", *options, str(place / "bin" / "python"), *words], environ


def times(label: str, benchmark: str, folder: Path, limit_s: float) -> dict[int, float]:
    """Return the least time of a benchmark by size; a bandwidth counts as the time of a byte."""
    words, environ = command(label, [str(PROGRAM), f"osu_{benchmark}", str(RUNS)])
    try:
        ended = subprocess.run(
            words, env=environ, cwd=folder, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {}
    least: dict[int, float] = {}
    for row in map(str.split, ended.stdout.splitlines()):
        if len(row) > 1 and row[0].isdigit():
            value = float(row[-1])
            if benchmark in BANDWIDTHS:
                value = 1 / value if value else math.inf  # a rate of few bytes on busy cores is shown as 0.00
            least[int(row[0])] = min(value, least.get(int(row[0]), value))
    return least


def table(least: dict[tuple[str, str], dict[int, float]], labels: list[str], sizes: list[int]) -> Iterator[str]:
    """Yield the lines of the table in Markdown: a row for each benchmark and library, and a column for each size."""
    yield f"| benchmark | Unisono's time by that of | {' | '.join(map(text_of, sizes))} |"
    yield f"|---|---|{'---|' * len(sizes)}"
    for benchmark in dict.fromkeys(each for each, _ in least):
        ours = least[benchmark, OURS]
        for label in labels:
            theirs = least[benchmark, label]
            cells = (f"{ours[size] / theirs[size]:.2f}" if size in ours and size in theirs else "" for size in sizes)
            yield f"| `osu_{benchmark}` | {label} | {' | '.join(cells)} |"


def text_of(nbytes: int) -> str:
    """Return a size as a column shows it, such as 64 KiB."""
    shift = next((shift for shift in (20, 10) if nbytes >= 1 << shift), 0)
    return f"{nbytes >> shift} {({0: 'B', 10: 'KiB', 20: 'MiB'})[shift]}"


def main() -> None:
    """Run the benchmarks, and print the table after each round."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    here = [label for label, (place, _) in MPIS.items() if place.exists()]
    parser.add_argument("--over", nargs="+", default=here, help="MPIs")
    parser.add_argument("--only", nargs="+", default=BENCHMARKS, help="benchmarks")
    parser.add_argument("--sizes", type=int, nargs="+", default=[0, 8, 1024, 8192, 65536, 1 << 20])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=120.0, help="seconds for each job")
    options = parser.parse_args()
    folder, least = downloaded().with_name("demo"), defaultdict[tuple[str, str], dict[int, float]](dict)
    for number in range(options.rounds):
        for benchmark in options.only:
            for label in random.sample([OURS, *options.over], 1 + len(options.over)):
                known = least[benchmark, label]
                for size, value in times(label, benchmark, folder, options.limit_s).items():
                    known[size] = min(value, known.get(size, value))
        lines = table(least, options.over, options.sizes)
        sys.stdout.write("\n".join([f"after {number + 1} of {options.rounds} rounds", *lines, ""]))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
