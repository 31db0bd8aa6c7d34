"""The entries of the registry for the collectives that only move data; their costs are in `algorithms.costs`."""

from __future__ import annotations

from unisono.algorithms import costs
from unisono.algorithms.algorithm import Algorithm, Builder
from unisono.algorithms.checks import needs_even, needs_power_of_two
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

BROADCAST: dict[str, Algorithm] = {
    "binomial": Algorithm(
        collective="broadcast",
        name="binomial",
        build=Builder("tree", "broadcast_binomial"),
        cost=costs.broadcast_binomial,
        reference=CHAN,
        commutative_only=False,
    ),
    "knomial": Algorithm(
        collective="broadcast",
        name="knomial",
        build=Builder("tree", "broadcast_knomial"),
        cost=costs.broadcast_knomial,
        reference=WILKINS,
        commutative_only=False,
    ),
    "chain": Algorithm(
        collective="broadcast",
        name="chain",
        build=Builder("chain", "broadcast_chain"),
        cost=costs.broadcast_chain,
        reference=PJESIVAC,
        commutative_only=False,
    ),
    "binary": Algorithm(
        collective="broadcast",
        name="binary",
        build=Builder("tree", "broadcast_binary"),
        cost=costs.broadcast_binary,
        reference=PJESIVAC,
        commutative_only=False,
    ),
    "double_binary_tree": Algorithm(
        collective="broadcast",
        name="double_binary_tree",
        build=Builder("double_tree", "broadcast_double_binary_tree"),
        cost=costs.broadcast_double_binary_tree,
        reference=SANDERS,
        commutative_only=False,
    ),
    "scatter_ring": Algorithm(
        collective="broadcast",
        name="scatter_ring",
        build=Builder("scatter_allgather", "broadcast_scatter_ring"),
        cost=costs.broadcast_scatter_ring,
        reference=THAKUR,
        commutative_only=False,
    ),
    "scatter_doubling": Algorithm(
        collective="broadcast",
        name="scatter_doubling",
        build=Builder("scatter_allgather", "broadcast_scatter_doubling"),
        cost=costs.broadcast_scatter_doubling,
        reference=THAKUR,
        commutative_only=False,
        supports=needs_power_of_two,
    ),
    "read": Algorithm(
        collective="broadcast",
        name="read",
        build=Builder("mapped", "broadcast_read"),
        cost=costs.broadcast_read,
        reference=f"{GRAHAM} (its broadcast, out of the memory of the root itself)",
        commutative_only=False,
        segmentable=False,
        mapped=True,
        by_name_only=True,  # what it costs depends on where the arrays of each rank lie, which ranks need not share
    ),
}

ALLGATHER: dict[str, Algorithm] = {
    "ring": Algorithm(
        collective="allgather",
        name="ring",
        build=Builder("ring", "allgather_ring"),
        cost=costs.shares_around,
        reference=CHAN,
        commutative_only=False,
        varying=True,
    ),
    "recursive_doubling": Algorithm(
        collective="allgather",
        name="recursive_doubling",
        build=Builder("doubling", "allgather_recursive_doubling"),
        cost=costs.allgather_logarithmic,
        reference=THAKUR,
        commutative_only=False,
        varying=True,
        supports=needs_power_of_two,
    ),
    "bruck": Algorithm(
        collective="allgather",
        name="bruck",
        build=Builder("bruck", "allgather_bruck"),
        cost=costs.allgather_logarithmic,
        reference=BRUCK,
        commutative_only=False,
        varying=True,
    ),
    "neighbour_exchange": Algorithm(
        collective="allgather",
        name="neighbour_exchange",
        build=Builder("neighbour_exchange", "allgather_neighbour_exchange"),
        cost=costs.allgather_neighbour_exchange,
        reference=CHEN,
        commutative_only=False,
        varying=True,
        supports=needs_even,
    ),
    "direct": Algorithm(
        collective="allgather",
        name="direct",
        build=Builder("direct", "allgather_direct"),
        cost=costs.shares_in_windows,
        reference=f"{CHAN} (its simple algorithm for short vectors, run for every root at once)",
        commutative_only=False,
        segmentable=False,
        varying=True,
    ),
    "circulant": Algorithm(
        collective="allgather",
        name="circulant",
        build=Builder("circulant", "allgather_circulant"),
        cost=costs.allgather_logarithmic,
        reference=TRAEFF,
        commutative_only=False,
        varying=True,
    ),
    "read": Algorithm(
        collective="allgather",
        name="read",
        build=Builder("mapped", "allgather_read"),
        cost=costs.allgather_read,
        reference=f"{SHAH} (the second phase of its two-phase all-pairs algorithm)",
        commutative_only=False,
        segmentable=False,
        mapped=True,
        by_name_only=True,  # what it costs depends on where the arrays of each rank lie, which ranks need not share
        varying=True,
    ),
}

GATHER: dict[str, Algorithm] = {
    "linear": Algorithm(
        collective="gather",
        name="linear",
        build=Builder("gather_scatter", "gather_linear"),
        cost=costs.gather_linear,
        reference=PJESIVAC,
        commutative_only=False,
        segmentable=False,
        varying=True,
    ),
    "binomial": Algorithm(
        collective="gather",
        name="binomial",
        build=Builder("gather_scatter", "gather_binomial"),
        cost=costs.gather_binomial,
        reference=CHAN,
        commutative_only=False,
        varying=True,
    ),
    "read": Algorithm(
        collective="gather",
        name="read",
        build=Builder("mapped", "gather_read"),
        cost=costs.gather_read,
        reference=f"{SHAH} (the second phase of its two-phase all-pairs algorithm, for one rank)",
        commutative_only=False,
        segmentable=False,
        mapped=True,
        by_name_only=True,  # what it costs depends on where the arrays of each rank lie, which ranks need not share
        varying=True,
    ),
}

SCATTER: dict[str, Algorithm] = {
    "linear": Algorithm(
        collective="scatter",
        name="linear",
        build=Builder("gather_scatter", "scatter_linear"),
        cost=costs.shares_in_windows,
        reference=PJESIVAC,
        commutative_only=False,
        segmentable=False,
        varying=True,
    ),
    "binomial": Algorithm(
        collective="scatter",
        name="binomial",
        build=Builder("gather_scatter", "scatter_binomial"),
        cost=costs.scatter_binomial,
        reference=CHAN,
        commutative_only=False,
        varying=True,
    ),
}

ALLTOALL: dict[str, Algorithm] = {
    "pairwise": Algorithm(
        collective="alltoall",
        name="pairwise",
        build=Builder("pairwise", "alltoall_pairwise"),
        cost=costs.shares_around,
        reference=THAKUR,
        commutative_only=False,
        in_place=False,
        segmentable=False,
        varying=True,
    ),
    "direct": Algorithm(
        collective="alltoall",
        name="direct",
        build=Builder("pairwise", "alltoall_direct"),
        cost=costs.shares_in_windows,
        reference=THAKUR,
        commutative_only=False,
        in_place=False,
        segmentable=False,
        varying=True,
    ),
    "bruck": Algorithm(
        collective="alltoall",
        name="bruck",
        build=Builder("bruck", "alltoall_bruck"),
        cost=costs.alltoall_bruck,
        reference=BRUCK,
        commutative_only=False,
        in_place=False,
    ),
    "read": Algorithm(
        collective="alltoall",
        name="read",
        build=Builder("mapped", "alltoall_read"),
        cost=costs.allgather_read,
        reference=f"{SHAH} (the second phase of its two-phase all-pairs algorithm, a block of each)",
        commutative_only=False,
        in_place=False,
        segmentable=False,
        mapped=True,
        by_name_only=True,  # what it costs depends on where the arrays of each rank lie, which ranks need not share
    ),
}

BARRIER: dict[str, Algorithm] = {
    "dissemination": Algorithm(
        collective="barrier",
        name="dissemination",
        build=Builder("dissemination", "barrier_dissemination"),
        cost=costs.barrier_dissemination,
        reference=HENSGEN,
        commutative_only=False,
        segmentable=False,
    ),
    "tree": Algorithm(
        collective="barrier",
        name="tree",
        build=Builder("tree", "barrier_tree"),
        cost=costs.barrier_tree,
        reference=MELLOR_CRUMMEY,
        commutative_only=False,
        segmentable=False,
    ),
    "flags": Algorithm(
        collective="barrier",
        name="flags",
        build=Builder("mapped", "barrier_flags"),
        cost=costs.barrier_flags,
        reference=f"{GRAHAM} (its fan-in and fan-out, by all ranks at once)",
        commutative_only=False,
        segmentable=False,
        mapped=True,
        by_name_only=True,  # what it costs depends on where the arrays of each rank lie, which ranks need not share
    ),
}
