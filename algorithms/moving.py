"""The entries of the registry for the collectives that only move data, with their costs in closed form.

p is the number of ranks, L = ⌈log_k p⌉ with k the radix. The vector that costs are multiples of is what a broadcast
carries, what the root of a gather or scatter has of all ranks, the OUTPUT of an allgather, the INPUT of a rank in an
alltoall, and the token of a barrier. A cost takes the parameters that its builder takes.
"""

from __future__ import annotations

from unisono.algorithms.algorithm import Algorithm, Cost
from unisono.algorithms.bruck import allgather_bruck, alltoall_bruck
from unisono.algorithms.chain import broadcast_chain
from unisono.algorithms.checks import needs_even, needs_power_of_two
from unisono.algorithms.circulant import allgather_circulant
from unisono.algorithms.direct import allgather_direct
from unisono.algorithms.dissemination import barrier_dissemination
from unisono.algorithms.double_tree import broadcast_double_binary_tree
from unisono.algorithms.doubling import allgather_recursive_doubling
from unisono.algorithms.gather_scatter import gather_binomial, gather_linear, scatter_binomial, scatter_linear
from unisono.algorithms.lanes import distances
from unisono.algorithms.mapped import allgather_read, barrier_flags, broadcast_read
from unisono.algorithms.neighbour_exchange import allgather_neighbour_exchange
from unisono.algorithms.pairwise import alltoall_direct, alltoall_pairwise
from unisono.algorithms.references import (
    BRUCK,
    CHAN,
    CHEN,
    GRAHAM,
    HENSGEN,
    MELLOR_CRUMMEY,
    PJESIVAC,
    SANDERS,
    SHAH,
    THAKUR,
    TRAEFF,
    WILKINS,
)
from unisono.algorithms.ring import allgather_ring
from unisono.algorithms.scatter_allgather import broadcast_scatter_doubling, broadcast_scatter_ring
from unisono.algorithms.tree import barrier_tree, broadcast_binary, broadcast_binomial, broadcast_knomial


def _rounds(size: int, radix: int = 2) -> int:
    """Return ⌈log_radix size⌉."""
    return len(list(distances(size, radix)))


def _others(size: int) -> float:
    """Return what all ranks but one have of the vector."""
    return (size - 1) / size


def _windows(size: int, window: int) -> int:
    """Return how many windows it takes to exchange with all other ranks."""
    return -(-(size - 1) // window)


def _most_messages(size: int, radix: int) -> int:
    """Return how many messages the top of a k-nomial tree sends: k - 1 in each round, and in the last what is left."""
    rounds = _rounds(size, radix)
    return (radix - 1) * (rounds - 1) - (-size // radix ** (rounds - 1)) - 1 if rounds else 0


def _cost_of_knomial(size: int, radix: int = 4) -> Cost:
    return Cost(rounds=_rounds(size, radix), sent=_most_messages(size, radix), reduced=0)


def _cost_of_binomial(size: int) -> Cost:
    return _cost_of_knomial(size, radix=2)


def _cost_of_chain(size: int) -> Cost:
    return Cost(rounds=size - 1, sent=min(1, size - 1), reduced=0)


def _cost_of_binary(size: int) -> Cost:
    return Cost(rounds=size.bit_length() - 1, sent=min(2, size - 1), reduced=0)


def _cost_of_double_binary_tree(size: int) -> Cost:
    """The depth of each tree over p - 1 ranks is ⌊log2(p - 1)⌋, and the root stands above it."""
    return Cost(rounds=_rounds(size), sent=min(1, size - 1), reduced=0)


def _cost_of_scatter_ring(size: int) -> Cost:
    return Cost(rounds=_rounds(size) + size - 1, sent=2 * (size - 1) / size, reduced=0)


def _cost_of_scatter_doubling(size: int) -> Cost:
    return Cost(rounds=2 * _rounds(size), sent=2 * (size - 1) / size, reduced=0)


def _cost_of_reading_the_root(size: int) -> Cost:
    """A flag of the root before and one to it after; what is read of the root counts as sent."""
    return Cost(rounds=2 * min(1, size - 1), sent=min(1, size - 1), reduced=0)


def _cost_around_ring(size: int) -> Cost:
    return Cost(rounds=size - 1, sent=_others(size), reduced=0)


def _cost_of_logarithmic_allgather(size: int, radix: int = 2) -> Cost:
    return Cost(rounds=_rounds(size, radix), sent=_others(size), reduced=0)


def _cost_of_neighbour_exchange(size: int) -> Cost:
    return Cost(rounds=size // 2, sent=_others(size), reduced=0)


def _cost_in_windows(size: int, window: int = 32) -> Cost:
    return Cost(rounds=_windows(size, window), sent=_others(size), reduced=0)


def _cost_of_reading_all(size: int, window: int = 32) -> Cost:
    """All ranks meet before and after; what is read of others counts as sent."""
    return Cost(rounds=2 * _windows(size, window), sent=_others(size), reduced=0)


def _cost_of_linear_gather(size: int, window: int = 32) -> Cost:
    """A rank sends its own share; what the root receives is all but one of them."""
    return Cost(rounds=_windows(size, window), sent=min(1, size - 1) / size, reduced=0)


def _cost_of_binomial_gather(size: int) -> Cost:
    """The rank that sends most hands up the further half of the tree or, if that is small, the half of the nearer."""
    half = 1 << _rounds(size) >> 1
    return Cost(rounds=_rounds(size), sent=max(size - half, half // 2) / size if half else 0, reduced=0)


def _cost_of_binomial_scatter(size: int) -> Cost:
    return Cost(rounds=_rounds(size), sent=_others(size), reduced=0)


def _cost_of_bruck_alltoall(size: int, radix: int = 2) -> Cost:
    """A block is sent once for each digit of its distance that is not 0: (L / 2)·n for a power of two and radix 2."""
    staying = sum(
        size // (radix * distance) * distance + min(size % (radix * distance), distance)
        for distance in distances(size, radix)
    )
    rounds = _rounds(size, radix)
    return Cost(rounds=rounds, sent=(rounds * size - staying) / size, reduced=0)


def _cost_of_dissemination(size: int, radix: int = 2) -> Cost:
    return Cost(rounds=_rounds(size, radix), sent=_most_messages(size, radix), reduced=0)


def _cost_of_tree_barrier(size: int, radix: int = 2) -> Cost:
    return Cost(rounds=2 * _rounds(size, radix), sent=_most_messages(size, radix), reduced=0)


def _cost_of_flags(size: int, window: int = 32) -> Cost:
    return Cost(rounds=_windows(size, window), sent=0, reduced=0)


BROADCAST: dict[str, Algorithm] = {
    "binomial": Algorithm(
        collective="broadcast",
        name="binomial",
        build=broadcast_binomial,
        cost=_cost_of_binomial,
        reference=CHAN,
        commutative_only=False,
    ),
    "knomial": Algorithm(
        collective="broadcast",
        name="knomial",
        build=broadcast_knomial,
        cost=_cost_of_knomial,
        reference=WILKINS,
        commutative_only=False,
    ),
    "chain": Algorithm(
        collective="broadcast",
        name="chain",
        build=broadcast_chain,
        cost=_cost_of_chain,
        reference=PJESIVAC,
        commutative_only=False,
    ),
    "binary": Algorithm(
        collective="broadcast",
        name="binary",
        build=broadcast_binary,
        cost=_cost_of_binary,
        reference=PJESIVAC,
        commutative_only=False,
    ),
    "double_binary_tree": Algorithm(
        collective="broadcast",
        name="double_binary_tree",
        build=broadcast_double_binary_tree,
        cost=_cost_of_double_binary_tree,
        reference=SANDERS,
        commutative_only=False,
    ),
    "scatter_ring": Algorithm(
        collective="broadcast",
        name="scatter_ring",
        build=broadcast_scatter_ring,
        cost=_cost_of_scatter_ring,
        reference=THAKUR,
        commutative_only=False,
    ),
    "scatter_doubling": Algorithm(
        collective="broadcast",
        name="scatter_doubling",
        build=broadcast_scatter_doubling,
        cost=_cost_of_scatter_doubling,
        reference=THAKUR,
        commutative_only=False,
        supports=needs_power_of_two,
    ),
    "read": Algorithm(
        collective="broadcast",
        name="read",
        build=broadcast_read,
        cost=_cost_of_reading_the_root,
        reference=f"{GRAHAM} (its broadcast, out of the memory of the root itself)",
        commutative_only=False,
        segmentable=False,
        mapped=True,
    ),
}

ALLGATHER: dict[str, Algorithm] = {
    "ring": Algorithm(
        collective="allgather",
        name="ring",
        build=allgather_ring,
        cost=_cost_around_ring,
        reference=CHAN,
        commutative_only=False,
        varying=True,
    ),
    "recursive_doubling": Algorithm(
        collective="allgather",
        name="recursive_doubling",
        build=allgather_recursive_doubling,
        cost=_cost_of_logarithmic_allgather,
        reference=THAKUR,
        commutative_only=False,
        varying=True,
        supports=needs_power_of_two,
    ),
    "bruck": Algorithm(
        collective="allgather",
        name="bruck",
        build=allgather_bruck,
        cost=_cost_of_logarithmic_allgather,
        reference=BRUCK,
        commutative_only=False,
        varying=True,
    ),
    "neighbour_exchange": Algorithm(
        collective="allgather",
        name="neighbour_exchange",
        build=allgather_neighbour_exchange,
        cost=_cost_of_neighbour_exchange,
        reference=CHEN,
        commutative_only=False,
        varying=True,
        supports=needs_even,
    ),
    "direct": Algorithm(
        collective="allgather",
        name="direct",
        build=allgather_direct,
        cost=_cost_in_windows,
        reference=f"{CHAN} (its simple algorithm for short vectors, run for every root at once)",
        commutative_only=False,
        segmentable=False,
        varying=True,
    ),
    "circulant": Algorithm(
        collective="allgather",
        name="circulant",
        build=allgather_circulant,
        cost=_cost_of_logarithmic_allgather,
        reference=TRAEFF,
        commutative_only=False,
        varying=True,
    ),
    "read": Algorithm(
        collective="allgather",
        name="read",
        build=allgather_read,
        cost=_cost_of_reading_all,
        reference=f"{SHAH} (the second phase of its two-phase all-pairs algorithm)",
        commutative_only=False,
        segmentable=False,
        mapped=True,
        varying=True,
    ),
}

GATHER: dict[str, Algorithm] = {
    "linear": Algorithm(
        collective="gather",
        name="linear",
        build=gather_linear,
        cost=_cost_of_linear_gather,
        reference=PJESIVAC,
        commutative_only=False,
        segmentable=False,
        varying=True,
    ),
    "binomial": Algorithm(
        collective="gather",
        name="binomial",
        build=gather_binomial,
        cost=_cost_of_binomial_gather,
        reference=CHAN,
        commutative_only=False,
        varying=True,
    ),
}

SCATTER: dict[str, Algorithm] = {
    "linear": Algorithm(
        collective="scatter",
        name="linear",
        build=scatter_linear,
        cost=_cost_in_windows,
        reference=PJESIVAC,
        commutative_only=False,
        segmentable=False,
        varying=True,
    ),
    "binomial": Algorithm(
        collective="scatter",
        name="binomial",
        build=scatter_binomial,
        cost=_cost_of_binomial_scatter,
        reference=CHAN,
        commutative_only=False,
        varying=True,
    ),
}

ALLTOALL: dict[str, Algorithm] = {
    "pairwise": Algorithm(
        collective="alltoall",
        name="pairwise",
        build=alltoall_pairwise,
        cost=_cost_around_ring,
        reference=THAKUR,
        commutative_only=False,
        in_place=False,
        segmentable=False,
        varying=True,
    ),
    "direct": Algorithm(
        collective="alltoall",
        name="direct",
        build=alltoall_direct,
        cost=_cost_in_windows,
        reference=THAKUR,
        commutative_only=False,
        in_place=False,
        segmentable=False,
        varying=True,
    ),
    "bruck": Algorithm(
        collective="alltoall",
        name="bruck",
        build=alltoall_bruck,
        cost=_cost_of_bruck_alltoall,
        reference=BRUCK,
        commutative_only=False,
        in_place=False,
    ),
}

BARRIER: dict[str, Algorithm] = {
    "dissemination": Algorithm(
        collective="barrier",
        name="dissemination",
        build=barrier_dissemination,
        cost=_cost_of_dissemination,
        reference=HENSGEN,
        commutative_only=False,
        segmentable=False,
    ),
    "tree": Algorithm(
        collective="barrier",
        name="tree",
        build=barrier_tree,
        cost=_cost_of_tree_barrier,
        reference=MELLOR_CRUMMEY,
        commutative_only=False,
        segmentable=False,
    ),
    "flags": Algorithm(
        collective="barrier",
        name="flags",
        build=barrier_flags,
        cost=_cost_of_flags,
        reference=f"{GRAHAM} (its fan-in and fan-out, by all ranks at once)",
        commutative_only=False,
        segmentable=False,
        mapped=True,
    ),
}
