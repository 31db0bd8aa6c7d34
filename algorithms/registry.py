"""The algorithms that Unisono comes with: a literal table, by collective and name.

Costs are the closed forms of the references, for any number of ranks p ≥ 1. The verifier's tests compare them with what
the plans really do.
"""

from __future__ import annotations

from unisono.algorithms.algorithm import Algorithm, Cost
from unisono.algorithms.direct import allreduce_direct
from unisono.algorithms.dissemination import barrier_dissemination
from unisono.algorithms.doubling import allreduce_recursive_doubling
from unisono.algorithms.ring import allreduce_ring
from unisono.algorithms.tree import broadcast_binomial
from unisono.errors import NoAlgorithmError


def _ceil_log2(size: int) -> int:
    return (size - 1).bit_length()


def _cost_of_direct(size: int) -> Cost:
    return Cost(rounds=min(1, size - 1), sent=size - 1, reduced=size - 1)


def _cost_of_ring(size: int) -> Cost:
    return Cost(rounds=2 * (size - 1), sent=2 * (size - 1) / size, reduced=(size - 1) / size)


def _cost_of_recursive_doubling(size: int) -> Cost:
    """The busiest rank of a folded pair combines once more and sends once more; it waits for both, two more rounds."""
    rounds = size.bit_length() - 1
    fold = 0 if size == 1 << rounds else 1
    return Cost(rounds=rounds + 2 * fold, sent=rounds + fold, reduced=rounds + fold)


def _cost_of_binomial(size: int) -> Cost:
    return Cost(rounds=_ceil_log2(size), sent=_ceil_log2(size), reduced=0)


def _cost_of_dissemination(size: int) -> Cost:
    """What is sent is tokens: the vector of a barrier is its one-element token."""
    return Cost(rounds=_ceil_log2(size), sent=_ceil_log2(size), reduced=0)


_THAKUR = "Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, IJHPCA 2005"
_CHAN = "Chan, Heimlich, Purkayastha, van de Geijn: Collective Communication: Theory, Practice, and Experience, 2007"
_HENSGEN = "Hensgen, Finkel, Manber: Two Algorithms for Barrier Synchronization, IJPP 17(1), 1988"

ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "allreduce": {
        "direct": Algorithm(
            collective="allreduce",
            name="direct",
            build=allreduce_direct,
            cost=_cost_of_direct,
            reference=f"{_CHAN} (its simple algorithm for short vectors, run for every root at once)",
            commutative_only=False,
            order="rank",
        ),
        "ring": Algorithm(
            collective="allreduce",
            name="ring",
            build=allreduce_ring,
            cost=_cost_of_ring,
            reference=_CHAN,
            order="fixed",
        ),
        "recursive_doubling": Algorithm(
            collective="allreduce",
            name="recursive_doubling",
            build=allreduce_recursive_doubling,
            cost=_cost_of_recursive_doubling,
            reference=_THAKUR,
            commutative_only=False,
            order="fixed",
        ),
    },
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
