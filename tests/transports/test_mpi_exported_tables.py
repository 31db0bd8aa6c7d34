"""MPI libraries read the decision tables that `unisono export` writes, and run the algorithms of their rules.

The bits of a sum of floats depend on the order of additions, and so on the algorithm. Ranks print sums of two lengths,
with rules and with each algorithm forced by a variable of the library.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import mpi_ranks

from unisono.tuning.decide.table import Decision, Range, Table
from unisono.tuning.exports import mpich, openmpi
from unisono.tuning.exports.counterparts import rules_of
from unisono.tuning.measure.measurement_log import Context

RANKS = 4
PROGRAM = """
import hashlib, json
import numpy as np
from mpi4py import MPI
world = MPI.COMM_WORLD
digests = []
for count in (256, 16384):
    x = np.random.default_rng(world.rank).random(count) * 10.0 ** np.arange(count).clip(0, 8)
    out = np.empty_like(x)
    world.Allreduce(x, out)
    digests.append(hashlib.md5(out.tobytes()).hexdigest())
    share = np.empty(count // world.size)
    world.Reduce_scatter_block(x, share)
    world.Bcast(out)
    assert hashlib.md5(out.tobytes()).hexdigest() == digests[-1]
    exchanged = np.empty_like(x)
    world.Alltoall(np.repeat(np.arange(4.0), count // 4), exchanged)
    assert (exchanged == world.rank).all()
    assert np.allclose(share, np.split(out, world.size)[world.rank])
    world.Barrier()
if world.rank == 0:
    print("DIGESTS", json.dumps(digests), flush=True)
"""


def table() -> Table:
    """Return a table that sums short vectors by recursive doubling and long ones by a ring."""
    ranges = {
        "allreduce": (Range(0, 16384, "recursive_doubling"), Range(16384, None, "ring")),
        "reduce_scatter": (Range(0, None, "recursive_halving"),),
        "broadcast": (Range(0, 4096, "binomial"), Range(4096, None, "scatter_ring")),
        "alltoall": (Range(0, 4096, "bruck"), Range(4096, None, "pairwise")),
    }
    return Table(
        {Context("m", name, "shm", "plain", RANKS, RANKS): Decision(each, (), {}) for name, each in ranges.items()}
    )


# For each library and each algorithm, the way to force it.
FORCED = {
    "openmpi": {
        name: {"OMPI_MCA_coll_tuned_allreduce_algorithm": number}
        for name, number in (("recursive_doubling", "3"), ("ring", "4"))
    },
    "mpich": {name: {"MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": name} for name in ("recursive_doubling", "ring")},
}
# These make the libraries ask the rules, and not components that are faster on one host.
SETTINGS = {
    "openmpi": {"OMPI_MCA_coll_tuned_priority": "100", "OMPI_MCA_coll_tuned_use_dynamic_rules": "1"},
    "mpich": {"MPIR_CVAR_DEVICE_COLLECTIVES": "none"},
}
VARIABLES = {
    "openmpi": "OMPI_MCA_coll_tuned_dynamic_rules_filename",
    "mpich": "MPIR_CVAR_COLL_SELECTION_TUNING_JSON_FILE",
}


def digests(library: str, variables: dict[str, str]) -> list[str]:
    """Return the digests of the sums of both lengths."""
    done = mpi_ranks.run(library, RANKS, PROGRAM, variables={**SETTINGS[library], **variables})
    lines = [line for line in done.stdout.splitlines() if line.startswith("DIGESTS")]
    assert lines, done.stdout + done.stderr
    return list(json.loads(lines[0].removeprefix("DIGESTS")))


@pytest.mark.parametrize("library", mpi_ranks.LIBRARIES)
def test_mpi_library_runs_the_algorithms_of_exported_rules(library: str, tmp_path: Path) -> None:
    path = tmp_path / "rules"
    if library == "openmpi":
        path.write_text(openmpi.written(rules_of(table(), openmpi.LIBRARY)[0]))
    else:
        shared = mpi_ranks.environment_of(library) / "lib" / "libmpi.so.12"
        base = mpich.base_in(shared.read_bytes(), str(shared))
        path.write_text(mpich.written(rules_of(table(), mpich.LIBRARY)[0], base))
    doubling, ring = (digests(library, FORCED[library][name]) for name in ("recursive_doubling", "ring"))
    assert not set(doubling) & set(ring)
    assert digests(library, {VARIABLES[library]: str(path)}) == [doubling[0], ring[1]]
