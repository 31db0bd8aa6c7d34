"""Allreduce by ranks that are processes and share one GPU, beside what else there is, in interleaved rounds."""

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
# What takes long is not measured beyond this.
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


class Teller:
    """Tells the rows of a size as soon as those of a larger one come, so that they are not lost with the stage.

    Attributes:
        has_ours: whether none that has been told is a failure of Unisono.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._told: set[int] = set()
        self.has_ours = True
        self.driver = Driver(settings, self)

    def step(self, doing: str) -> None:
        """A step of the driver begins."""
        sizes = {sample.nbytes for sample in self.driver.results.samples}
        self.tell_below(max(sizes, default=0))

    def tell_below(self, nbytes: float) -> None:
        """Tell what has been found for all sizes below this one, and has not been told."""
        found = [row for row in rows(self._settings, self.driver.results) if row.nbytes < nbytes]
        for row in found:
            if row.nbytes not in self._told:
                _tell(row, self._settings.ranks)
                self.has_ours &= row.library != OURS or not row.failure
        self._told |= {row.nbytes for row in found}


def _tell(row: Row, ranks: int) -> None:
    about = {"placement": "processes", "ranks": ranks, "library": row.library, "nbytes": row.nbytes}
    if row.failure:
        tell("allreduce", **about, failure=row.failure)
    else:
        tell("allreduce", **about, median_us=row.median_us, p90_us=row.p90_us, calls=row.calls)


def main() -> int:
    """Measure what the command line says, and tell each row; return 1 if Unisono has failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=parse_sizes, default=parse_sizes("1K:1G:16,16M"))
    parser.add_argument("--libraries", default=",".join(LIBRARIES))
    parser.add_argument("--seconds", type=float, default=0.15)
    parser.add_argument("--deadline", type=float, default=20.0)
    asked = parser.parse_args()
    libraries = tuple(LIBRARIES[name] for name in asked.libraries.split(","))
    settings = Settings(
        "allreduce", asked.ranks, asked.sizes, "float32", 4, libraries, 3, asked.seconds, "none", "any", asked.deadline
    )
    teller = Teller(settings)
    teller.driver.run()
    teller.tell_below(math.inf)
    return 0 if teller.has_ours else 1


if __name__ == "__main__":
    sys.exit(main())
