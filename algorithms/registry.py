"""The algorithms that Unisono comes with: a literal table, by collective and name.

Costs are the closed forms of the references, for any number of ranks p ≥ 1. The verifier's tests compare them with what
the plans really do.
"""

from __future__ import annotations

from unisono.algorithms.algorithm import Algorithm, Cost
from unisono.algorithms.dissemination import barrier_dissemination
from unisono.algorithms.reducing import ALLREDUCE
from unisono.algorithms.tree import broadcast_binomial
from unisono.errors import NoAlgorithmError


def _ceil_log2(size: int) -> int:
    return (size - 1).bit_length()


def _cost_of_binomial(size: int) -> Cost:
    return Cost(rounds=_ceil_log2(size), sent=_ceil_log2(size), reduced=0)


def _cost_of_dissemination(size: int) -> Cost:
    """What is sent is tokens: the vector of a barrier is its one-element token."""
    return Cost(rounds=_ceil_log2(size), sent=_ceil_log2(size), reduced=0)


_CHAN = "Chan, Heimlich, Purkayastha, van de Geijn: Collective Communication: Theory, Practice, and Experience, 2007"
_HENSGEN = "Hensgen, Finkel, Manber: Two Algorithms for Barrier Synchronization, IJPP 17(1), 1988"

ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "allreduce": ALLREDUCE,
    "broadcast": {
        "binomial": Algorithm(
            collective="broadcast",
            name="binomial",
            build=broadcast_binomial,
            cost=_cost_of_binomial,
            reference=_CHAN,
            commutative_only=False,
        ),
    },
    "barrier": {
        "dissemination": Algorithm(
            collective="barrier",
            name="dissemination",
            build=barrier_dissemination,
            cost=_cost_of_dissemination,
            reference=_HENSGEN,
            commutative_only=False,
            segmentable=False,
        ),
    },
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
