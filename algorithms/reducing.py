"""The entries of the registry for the collectives that reduce; their costs are in `algorithms.costs`."""

from __future__ import annotations

from unisono.algorithms import costs
from unisono.algorithms.algorithm import Algorithm
from unisono.algorithms.balanced_tree import allreduce_balanced_tree
from unisono.algorithms.chain import allreduce_chain, reduce_chain
from unisono.algorithms.circulant import allreduce_circulant, reduce_scatter_circulant
from unisono.algorithms.direct import allreduce_direct, reduce_scatter_direct
from unisono.algorithms.double_tree import allreduce_double_binary_tree, reduce_double_binary_tree
from unisono.algorithms.doubling import allreduce_recursive_doubling
from unisono.algorithms.in_order_tree import allreduce_reduce_broadcast, reduce_binary
from unisono.algorithms.mapped import allreduce_one_shot, allreduce_two_shot
from unisono.algorithms.multiplying import allreduce_recursive_multiplying
from unisono.algorithms.pairwise import reduce_scatter_pairwise
from unisono.algorithms.rabenseifner import (
    allreduce_rabenseifner,
    reduce_rabenseifner,
    reduce_scatter_recursive_halving,
)
from unisono.algorithms.references import (
    ARTEAGA,
    CHAN,
    HILLIS,
    JAIN,
    MULTI_LANE,
    PJESIVAC,
    RABENSEIFNER,
    RUEFENACHT,
    SANDERS,
    SCAN_OF_MPI,
    SHAH,
    THAKUR,
    TRAEFF,
    WILKINS,
)
from unisono.algorithms.ring import (
    allreduce_bidirectional_ring,
    allreduce_multi_lane_ring,
    allreduce_ring,
    reduce_scatter_ring,
)
from unisono.algorithms.scan import exscan_linear, exscan_recursive_doubling, scan_linear, scan_recursive_doubling
from unisono.algorithms.tree import reduce_binomial, reduce_knomial

ALLREDUCE: dict[str, Algorithm] = {
    "direct": Algorithm(
        collective="allreduce",
        name="direct",
        build=allreduce_direct,
        cost=costs.allreduce_direct,
        reference=f"{CHAN} (its simple algorithm for short vectors, run for every root at once)",
        commutative_only=False,
        order="rank",
    ),
    "ring": Algorithm(
        collective="allreduce",
        name="ring",
        build=allreduce_ring,
        cost=costs.allreduce_ring,
        reference=CHAN,
        order="fixed",
    ),
    "recursive_doubling": Algorithm(
        collective="allreduce",
        name="recursive_doubling",
        build=allreduce_recursive_doubling,
        cost=costs.allreduce_recursive_doubling,
        reference=THAKUR,
        commutative_only=False,
        order="fixed",
    ),
    "bidirectional_ring": Algorithm(
        collective="allreduce",
        name="bidirectional_ring",
        build=allreduce_bidirectional_ring,
        cost=costs.allreduce_ring,
        reference=JAIN,
        order="fixed",
    ),
    "multi_lane_ring": Algorithm(
        collective="allreduce",
        name="multi_lane_ring",
        build=allreduce_multi_lane_ring,
        cost=costs.allreduce_ring,
        reference=MULTI_LANE,
        order="fixed",
    ),
    "recursive_multiplying": Algorithm(
        collective="allreduce",
        name="recursive_multiplying",
        build=allreduce_recursive_multiplying,
        cost=costs.allreduce_recursive_multiplying,
        reference=RUEFENACHT,
        commutative_only=False,
        order="fixed",
    ),
    "rabenseifner": Algorithm(
        collective="allreduce",
        name="rabenseifner",
        build=allreduce_rabenseifner,
        cost=costs.allreduce_rabenseifner,
        reference=RABENSEIFNER,
        commutative_only=False,
        order="fixed",
    ),
    "circulant": Algorithm(
        collective="allreduce",
        name="circulant",
        build=allreduce_circulant,
        cost=costs.allreduce_circulant,
        reference=TRAEFF,
        order="fixed",
    ),
    "reduce_broadcast": Algorithm(
        collective="allreduce",
        name="reduce_broadcast",
        build=allreduce_reduce_broadcast,
        cost=costs.allreduce_reduce_broadcast,
        reference=f"{PJESIVAC} (its in-order binary reduce, and the broadcast down the same tree)",
        commutative_only=False,
        order="fixed",
    ),
    "chain": Algorithm(
        collective="allreduce",
        name="chain",
        build=allreduce_chain,
        cost=costs.allreduce_chain,
        reference=f"{PJESIVAC} (its pipelined reduce, and the broadcast back)",
        commutative_only=False,
        order="fixed",
    ),
    "double_binary_tree": Algorithm(
        collective="allreduce",
        name="double_binary_tree",
        build=allreduce_double_binary_tree,
        cost=costs.allreduce_double_binary_tree,
        reference=SANDERS,
        order="fixed",
    ),
    "balanced_tree": Algorithm(
        collective="allreduce",
        name="balanced_tree",
        build=allreduce_balanced_tree,
        cost=costs.allreduce_balanced_tree,
        reference=f"{CHAN} (the two exchanges); {ARTEAGA} (the order)",
        commutative_only=False,
        order="canonical",
        segmentable=False,
        by_name_only=True,  # each of its rounds is a message to every rank, which the model takes for one latency
    ),
    "one_shot": Algorithm(
        collective="allreduce",
        name="one_shot",
        build=allreduce_one_shot,
        cost=costs.allreduce_one_shot,
        reference=f"{SHAH} (its one-phase all-pairs algorithm)",
        commutative_only=False,
        order="rank",
        segmentable=False,
        mapped=True,
        by_name_only=True,  # what it costs depends on where the arrays of each rank lie, which ranks need not share
    ),
    "two_shot": Algorithm(
        collective="allreduce",
        name="two_shot",
        build=allreduce_two_shot,
        cost=costs.allreduce_two_shot,
        reference=f"{SHAH} (its two-phase all-pairs algorithm)",
        commutative_only=False,
        order="rank",
        segmentable=False,
        mapped=True,
        by_name_only=True,  # what it costs depends on where the arrays of each rank lie, which ranks need not share
    ),
}

REDUCE: dict[str, Algorithm] = {
    "binomial": Algorithm(
        collective="reduce",
        name="binomial",
        build=reduce_binomial,
        cost=costs.reduce_binomial,
        reference=THAKUR,
        commutative_only=False,
        order="canonical",
    ),
    "knomial": Algorithm(
        collective="reduce",
        name="knomial",
        build=reduce_knomial,
        cost=costs.reduce_knomial,
        reference=WILKINS,
        commutative_only=False,
        order="fixed",
    ),
    "chain": Algorithm(
        collective="reduce",
        name="chain",
        build=reduce_chain,
        cost=costs.reduce_chain,
        reference=PJESIVAC,
        order="fixed",
    ),
    "binary": Algorithm(
        collective="reduce",
        name="binary",
        build=reduce_binary,
        cost=costs.reduce_binary,
        reference=PJESIVAC,
        commutative_only=False,
        order="fixed",
    ),
    "rabenseifner": Algorithm(
        collective="reduce",
        name="rabenseifner",
        build=reduce_rabenseifner,
        cost=costs.reduce_rabenseifner,
        reference=RABENSEIFNER,
        commutative_only=False,
        order="fixed",
    ),
    "double_binary_tree": Algorithm(
        collective="reduce",
        name="double_binary_tree",
        build=reduce_double_binary_tree,
        cost=costs.reduce_double_binary_tree,
        reference=SANDERS,
        order="fixed",
    ),
}

REDUCE_SCATTER: dict[str, Algorithm] = {
    "recursive_halving": Algorithm(
        collective="reduce_scatter",
        name="recursive_halving",
        build=reduce_scatter_recursive_halving,
        cost=costs.reduce_scatter_recursive_halving,
        reference=THAKUR,
        order="fixed",
        varying=True,
    ),
    "ring": Algorithm(
        collective="reduce_scatter",
        name="ring",
        build=reduce_scatter_ring,
        cost=costs.reduce_scatter_around,
        reference=CHAN,
        order="fixed",
        varying=True,
    ),
    "pairwise": Algorithm(
        collective="reduce_scatter",
        name="pairwise",
        build=reduce_scatter_pairwise,
        cost=costs.reduce_scatter_around,
        reference=THAKUR,
        order="fixed",
        varying=True,
    ),
    "circulant": Algorithm(
        collective="reduce_scatter",
        name="circulant",
        build=reduce_scatter_circulant,
        cost=costs.reduce_scatter_circulant,
        reference=TRAEFF,
        order="fixed",
        varying=True,
    ),
    "direct": Algorithm(
        collective="reduce_scatter",
        name="direct",
        build=reduce_scatter_direct,
        cost=costs.reduce_scatter_direct,
        reference=f"{CHAN} (its simple algorithm for short vectors, run for every root at once)",
        commutative_only=False,
        order="rank",
        segmentable=False,
        varying=True,
    ),
}

SCAN: dict[str, Algorithm] = {
    "linear": Algorithm(
        collective="scan",
        name="linear",
        build=scan_linear,
        cost=costs.scan_linear,
        reference=SCAN_OF_MPI,
        commutative_only=False,
        order="rank",
    ),
    "recursive_doubling": Algorithm(
        collective="scan",
        name="recursive_doubling",
        build=scan_recursive_doubling,
        cost=costs.scan_recursive_doubling,
        reference=HILLIS,
        commutative_only=False,
        order="fixed",
    ),
}

EXSCAN: dict[str, Algorithm] = {
    "linear": Algorithm(
        collective="exscan",
        name="linear",
        build=exscan_linear,
        cost=costs.exscan_linear,
        reference=SCAN_OF_MPI,
        commutative_only=False,
        order="rank",
    ),
    "recursive_doubling": Algorithm(
        collective="exscan",
        name="recursive_doubling",
        build=exscan_recursive_doubling,
        cost=costs.exscan_recursive_doubling,
        reference=HILLIS,
        commutative_only=False,
        order="fixed",
    ),
}
