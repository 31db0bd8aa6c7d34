"""The algorithms that Unisono comes with: a literal table, by collective and name.

Costs are the closed forms of the references, for any number of ranks p ≥ 1. The verifier's tests compare them with what
the plans really do.
"""

from __future__ import annotations

from unisono.algorithms.algorithm import Algorithm
from unisono.algorithms.moving import ALLGATHER, ALLTOALL, BARRIER, BROADCAST, GATHER, SCATTER
from unisono.algorithms.reducing import ALLREDUCE, EXSCAN, REDUCE, REDUCE_SCATTER, SCAN
from unisono.errors import NoAlgorithmError

ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "allreduce": ALLREDUCE,
    "reduce": REDUCE,
    "reduce_scatter": REDUCE_SCATTER,
    "scan": SCAN,
    "exscan": EXSCAN,
    "broadcast": BROADCAST,
    "allgather": ALLGATHER,
    "gather": GATHER,
    "scatter": SCATTER,
    "alltoall": ALLTOALL,
    "barrier": BARRIER,
}


def find(collective: str, name: str) -> Algorithm:
    """Return the algorithm of `collective` that is called `name`.

    Raises:
        NoAlgorithmError: there is none; the message lists those there are.
    """
    of_collective = ALGORITHMS.get(collective)
    if of_collective is None:
        raise NoAlgorithmError(f"no algorithm carries out {collective!r}: there are {', '.join(ALGORITHMS)}")
    if name not in of_collective:
        raise NoAlgorithmError(f"{collective} has no algorithm {name!r}: it has {', '.join(of_collective)}")
    return of_collective[name]
