"""Measures allreduce among processes that share one GPU, next to other libraries, in interleaved rounds."""

from __future__ import annotations

import argparse
import math
import sys

from unisono.bench.driver import Driver, Settings
from unisono.bench.gpu_stages.records import tell
from unisono.bench.peers import AS_ROOT, UNISONO_RUN, Library
from unisono.bench.report import Row, rows
from unisono.bench.sizes import parse_sizes

TORCHRUN = "{python} -m torch.distributed.run --standalone --nproc-per-node {ranks} --no-python {worker}"
MPIRUN = "mpirun -n {ranks} --bind-to none --map-by slot:oversubscribe {worker}"
# Slow libraries are measured only up to this size.
MOST = {"BENCH_MOST_NBYTES": str(64 << 20)}
SHARED_GPU = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}


def _torch(name: str, way: str, **variables: str) -> Library:
    named = {"BENCH_TORCH_WAY": way, "GLOO_SOCKET_IFNAME": "lo", **SHARED_GPU, **variables}
    return Library(name, "torch_cuda", TORCHRUN, "RANK", variables=named, binds=False)


OURS = "unisono"
LIBRARIES = {
    library.name: library
    for library in (
        Library(OURS, "unisono_cuda", UNISONO_RUN, "UNISONO_RANK", binds=False),
        _torch("gloo", "gloo", **MOST),
        _torch("symm_mem one-shot", "one_shot", **MOST),
        _torch("symm_mem two-shot", "two_shot"),
        _torch("nccl", "nccl"),
        Library("MPI staged", "mpi_cuda", MPIRUN, "OMPI_COMM_WORLD_RANK", variables={**AS_ROOT, **MOST}, binds=False),
    )
}


class RowPrinter:
    """Prints the rows of a size as soon as those of a larger size arrive, so that a deadline does not lose them.

    Attributes:
        has_ours: whether no printed row is a failure of Unisono.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._printed: set[int] = set()
        self.has_ours = True
        self.driver = Driver(settings, self)

    def step(self, description: str) -> None:
        """Note that a step of the driver begins."""
        sizes = {sample.nbytes for sample in self.driver.results.samples}
        self.print_below(max(sizes, default=0))

    def print_below(self, nbytes: float) -> None:
        """Print all rows of smaller sizes that have not been printed."""
        below = [row for row in rows(self._settings, self.driver.results) if row.nbytes < nbytes]
        for row in below:
            if row.nbytes not in self._printed:
                _print_row(row, self._settings.ranks)
                self.has_ours &= row.library != OURS or not row.failure
        self._printed |= {row.nbytes for row in below}


def _print_row(row: Row, ranks: int) -> None:
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
    libraries = tuple(LIBRARIES[name] for name in options.libraries.split(","))
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
    printer.print_below(math.inf)
    return 0 if printer.has_ours else 1


if __name__ == "__main__":
    sys.exit(main())
