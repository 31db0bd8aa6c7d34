"""Measures allreduce among processes that share one GPU, next to other libraries, in interleaved rounds."""

from __future__ import annotations

import argparse
import importlib.util
import math
import shutil
import sys

from unisono.bench.driver import BenchDriver, Settings
from unisono.bench.gpu_stages import nccl
from unisono.bench.gpu_stages.results.records import tell
from unisono.bench.peers import AS_ROOT, UNISONO_RUN, Library
from unisono.bench.report import LibraryTimes, rows
from unisono.bench.sizes import parse_sizes

MPIRUN = "mpirun -n {ranks} --bind-to none --map-by slot:oversubscribe {worker}"
# Slow libraries are measured only up to this size.
MOST = {"BENCH_MOST_NBYTES": str(64 << 20)}
SHARED_GPU = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}


def _torch(name: str, way: str, **variables: str) -> Library:
    named = {"BENCH_TORCH_WAY": way, "GLOO_SOCKET_IFNAME": "lo", **SHARED_GPU, **variables}
    # Not torchrun, whose agent imports torch first, which takes seconds.
    return Library(name, "torch_cuda", UNISONO_RUN, "UNISONO_RANK", variables=named, binds=False)


OURS = "unisono"
LIBRARIES = {
    library.name: library
    for library in (
        Library(OURS, "unisono_cuda", UNISONO_RUN, "UNISONO_RANK", binds=False),
        Library("unisono plans", "unisono_cuda_plan", UNISONO_RUN, "UNISONO_RANK", binds=False),
        _torch("gloo", "gloo", **MOST),
        _torch("symm_mem one-shot", "one_shot", **MOST),
        _torch("symm_mem two-shot", "two_shot"),
        _torch("nccl", "nccl"),
        Library("nccl.native", "unisono_cuda_nccl", UNISONO_RUN, "UNISONO_RANK", variables=SHARED_GPU, binds=False),
        Library("MPI staged", "mpi_cuda", MPIRUN, "OMPI_COMM_WORLD_RANK", variables={**AS_ROOT, **MOST}, binds=False),
    )
}


def _mpi_refusal() -> str | None:
    has_mpi4py = importlib.util.find_spec("mpi4py") is not None
    return None if shutil.which("mpirun") and has_mpi4py else "mpirun or mpi4py is not installed"


def _no_refusal() -> None:
    return None


# Functions that say why a library cannot be measured; starting it to see that takes seconds.
REFUSALS = {"nccl": nccl.refusal, "nccl.native": nccl.refusal, "MPI staged": _mpi_refusal}


class RowPrinter:
    """Prints the rows of a size as soon as its last round has ended, so that a deadline does not lose them.

    Attributes:
        has_ours: whether no printed row is a failure of Unisono.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._printed: set[int] = set()
        self.has_ours = True
        self.driver = BenchDriver(settings, self)

    def step(self, description: str) -> None:
        """Note that a step of the driver begins, and print the rows of sizes whose last round has ended."""
        samples, last = self.driver.results.samples, self._settings.rounds - 1
        measured = {sample.nbytes for sample in samples if sample.round == last}
        self.print_up_to(max(measured, default=-1))

    def print_up_to(self, nbytes: float) -> None:
        """Print all rows of this size and smaller ones that have not been printed."""
        ended = [row for row in rows(self._settings, self.driver.results) if row.nbytes <= nbytes]
        for row in ended:
            if row.nbytes not in self._printed:
                _print_row(row, self._settings.ranks)
                self.has_ours &= row.library != OURS or not row.failure
        self._printed |= {row.nbytes for row in ended}


def _print_row(row: LibraryTimes, ranks: int) -> None:
    about = {"placement": "processes", "ranks": ranks, "library": row.library, "nbytes": row.nbytes}
    if row.failure:
        tell("allreduce", **about, failure=row.failure)
    else:
        tell("allreduce", **about, median_us=row.median_us, p90_us=row.p90_us, calls=row.calls)


def main() -> int:
    """Run the measurement that the command line asks for, and print each row; return 1 if Unisono has failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=parse_sizes, default=parse_sizes("1K:1G:16,16M"))
    parser.add_argument("--libraries", default=",".join(LIBRARIES))
    parser.add_argument("--seconds", type=float, default=0.15)
    parser.add_argument("--deadline", type=float, default=20.0)
    options = parser.parse_args()
    refusals = {name: REFUSALS.get(name, _no_refusal)() for name in options.libraries.split(",")}
    for name, reason in refusals.items():
        if reason is not None:
            _print_row(LibraryTimes(options.sizes[0], "unknown", name, failure=reason), options.ranks)
    libraries = tuple(LIBRARIES[name] for name, reason in refusals.items() if reason is None)
    settings = Settings(
        "allreduce",
        options.ranks,
        options.sizes,
        "float32",
        4,
        libraries,
        3,
        options.seconds,
        "none",
        "any",
        options.deadline,
    )
    printer = RowPrinter(settings)
    printer.driver.run()
    printer.print_up_to(math.inf)
    return 0 if printer.has_ours else 1


if __name__ == "__main__":
    sys.exit(main())
