"""The entries of the registry for the collectives that only move data; their costs are in `algorithms.costs`."""

from __future__ import annotations

from unisono.algorithms import costs
from unisono.algorithms.algorithm import Algorithm
from unisono.algorithms.bruck import allgather_bruck, alltoall_bruck
from unisono.algorithms.chain import broadcast_chain
from unisono.algorithms.checks import needs_even, needs_power_of_two
from unisono.algorithms.circulant import allgather_circulant
from unisono.algorithms.direct import allgather_direct
from unisono.algorithms.dissemination import barrier_dissemination
from unisono.algorithms.double_tree import broadcast_double_binary_tree
from unisono.algorithms.doubling import allgather_recursive_doubling
from unisono.algorithms.gather_scatter import gather_binomial, gather_linear, scatter_binomial, scatter_linear
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

BROADCAST: dict[str, Algorithm] = {
    "binomial": Algorithm(
        collective="broadcast",
        name="binomial",
        build=broadcast_binomial,
        cost=costs.broadcast_binomial,
        reference=CHAN,
        commutative_only=False,
    ),
    "knomial": Algorithm(
        collective="broadcast",
        name="knomial",
        build=broadcast_knomial,
        cost=costs.broadcast_knomial,
        reference=WILKINS,
        commutative_only=False,
    ),
    "chain": Algorithm(
        collective="broadcast",
        name="chain",
        build=broadcast_chain,
        cost=costs.broadcast_chain,
        reference=PJESIVAC,
        commutative_only=False,
    ),
    "binary": Algorithm(
        collective="broadcast",
        name="binary",
        build=broadcast_binary,
        cost=costs.broadcast_binary,
        reference=PJESIVAC,
        commutative_only=False,
    ),
    "double_binary_tree": Algorithm(
        collective="broadcast",
        name="double_binary_tree",
        build=broadcast_double_binary_tree,
        cost=costs.broadcast_double_binary_tree,
        reference=SANDERS,
        commutative_only=False,
    ),
    "scatter_ring": Algorithm(
        collective="broadcast",
        name="scatter_ring",
        build=broadcast_scatter_ring,
        cost=costs.broadcast_scatter_ring,
        reference=THAKUR,
        commutative_only=False,
    ),
    "scatter_doubling": Algorithm(
        collective="broadcast",
        name="scatter_doubling",
        build=broadcast_scatter_doubling,
        cost=costs.broadcast_scatter_doubling,
        reference=THAKUR,
        commutative_only=False,
        supports=needs_power_of_two,
    ),
    "read": Algorithm(
        collective="broadcast",
        name="read",
        build=broadcast_read,
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
        build=allgather_ring,
        cost=costs.shares_around,
        reference=CHAN,
        commutative_only=False,
        varying=True,
    ),
    "recursive_doubling": Algorithm(
        collective="allgather",
        name="recursive_doubling",
        build=allgather_recursive_doubling,
        cost=costs.allgather_logarithmic,
        reference=THAKUR,
        commutative_only=False,
        varying=True,
        supports=needs_power_of_two,
    ),
    "bruck": Algorithm(
        collective="allgather",
        name="bruck",
        build=allgather_bruck,
        cost=costs.allgather_logarithmic,
        reference=BRUCK,
        commutative_only=False,
        varying=True,
    ),
    "neighbour_exchange": Algorithm(
        collective="allgather",
        name="neighbour_exchange",
        build=allgather_neighbour_exchange,
        cost=costs.allgather_neighbour_exchange,
        reference=CHEN,
        commutative_only=False,
        varying=True,
        supports=needs_even,
    ),
    "direct": Algorithm(
        collective="allgather",
        name="direct",
        build=allgather_direct,
        cost=costs.shares_in_windows,
        reference=f"{CHAN} (its simple algorithm for short vectors, run for every root at once)",
        commutative_only=False,
        segmentable=False,
        varying=True,
    ),
    "circulant": Algorithm(
        collective="allgather",
        name="circulant",
        build=allgather_circulant,
        cost=costs.allgather_logarithmic,
        reference=TRAEFF,
        commutative_only=False,
        varying=True,
    ),
    "read": Algorithm(
        collective="allgather",
        name="read",
        build=allgather_read,
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
        build=gather_linear,
        cost=costs.gather_linear,
        reference=PJESIVAC,
        commutative_only=False,
        segmentable=False,
        varying=True,
    ),
    "binomial": Algorithm(
        collective="gather",
        name="binomial",
        build=gather_binomial,
        cost=costs.gather_binomial,
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
        cost=costs.shares_in_windows,
        reference=PJESIVAC,
        commutative_only=False,
        segmentable=False,
        varying=True,
    ),
    "binomial": Algorithm(
        collective="scatter",
        name="binomial",
        build=scatter_binomial,
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
        build=alltoall_pairwise,
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
        build=alltoall_direct,
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
        build=alltoall_bruck,
        cost=costs.alltoall_bruck,
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
        cost=costs.barrier_dissemination,
        reference=HENSGEN,
        commutative_only=False,
        segmentable=False,
    ),
    "tree": Algorithm(
        collective="barrier",
        name="tree",
        build=barrier_tree,
        cost=costs.barrier_tree,
        reference=MELLOR_CRUMMEY,
        commutative_only=False,
        segmentable=False,
    ),
    "flags": Algorithm(
        collective="barrier",
        name="flags",
        build=barrier_flags,
        cost=costs.barrier_flags,
        reference=f"{GRAHAM} (its fan-in and fan-out, by all ranks at once)",
        commutative_only=False,
        segmentable=False,
        mapped=True,
        by_name_only=True,  # what it costs depends on where the arrays of each rank lie, which ranks need not share
    ),
}
