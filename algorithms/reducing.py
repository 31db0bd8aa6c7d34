"""The entries of the registry for the collectives that reduce, with their costs in closed form.

p is the number of ranks, L = ⌈log2 p⌉. A rooted algorithm has the cost of its most expensive root.
"""

from __future__ import annotations

from unisono.algorithms.algorithm import Algorithm, Cost
from unisono.algorithms.direct import allreduce_direct
from unisono.algorithms.doubling import allreduce_recursive_doubling
from unisono.algorithms.ring import allreduce_ring


def _cost_of_direct(size: int) -> Cost:
    return Cost(rounds=min(1, size - 1), sent=size - 1, reduced=size - 1)


def _cost_of_ring(size: int) -> Cost:
    return Cost(rounds=2 * (size - 1), sent=2 * (size - 1) / size, reduced=(size - 1) / size)


def _cost_of_recursive_doubling(size: int) -> Cost:
    """The busiest rank of a folded pair combines once more and sends once more; it waits for both, two more rounds."""
    rounds = size.bit_length() - 1
    fold = 0 if size == 1 << rounds else 1
    return Cost(rounds=rounds + 2 * fold, sent=rounds + fold, reduced=rounds + fold)


_THAKUR = "Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, IJHPCA 2005"
_CHAN = "Chan, Heimlich, Purkayastha, van de Geijn: Collective Communication: Theory, Practice, and Experience, 2007"

ALLREDUCE: dict[str, Algorithm] = {
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
}
