"""The table rows of the collectives that only move data. Their costs are in `catalogue.costs`."""

from __future__ import annotations

from functools import partial

from unisono.algorithms.builders.arguments import needs_even, needs_power_of_two
from unisono.algorithms.catalogue import costs, host_crossing
from unisono.algorithms.catalogue.references import (
    BINE,
    BRUCK,
    CHAN,
    CHEN,
    GRAHAM,
    HENSGEN,
    JAIN,
    JEAUGEY,
    MELLOR_CRUMMEY,
    PJESIVAC,
    SANDERS,
    SHAH,
    SWING,
    THAKUR,
    TRAEFF,
    TRAEFF_BLOCKS,
    WILKINS,
)
from unisono.algorithms.catalogue.rows import MAPPED, SHORT_WAYS, row, table

BROADCAST = table(
    "broadcast",
    row("binomial", "tree", costs.broadcast_binomial, CHAN, crossing=host_crossing.down_tree),
    row("knomial", "tree", costs.broadcast_knomial, WILKINS, crossing=partial(host_crossing.down_tree, radix=4)),
    row("chain", "chain", costs.broadcast_chain, PJESIVAC),
    row("binary", "tree", costs.broadcast_binary, PJESIVAC),
    row("double_binary_tree", "double_tree", costs.broadcast_double_binary_tree, SANDERS),
    row(
        "circulant_blocks",
        "circulant_blocks",
        costs.broadcast_circulant_blocks,
        TRAEFF_BLOCKS,
        crossing=host_crossing.evenly,
        segmentable=False,
        in_blocks=True,
    ),
    row("scatter_ring", "scatter_allgather", costs.broadcast_scatter_ring, THAKUR),
    row("scatter_doubling", "scatter_allgather", costs.broadcast_scatter_doubling, THAKUR, supports=needs_power_of_two),
    row("bine", "bine", costs.broadcast_bine, BINE, **SHORT_WAYS),
    row(
        "read",
        "mapped",
        costs.broadcast_read,
        f"{GRAHAM} (its broadcast, out of the memory of the root itself)",
        **MAPPED,
    ),
    commutative_only=False,
)

ALLGATHER = table(
    "allgather",
    row("ring", "ring", costs.shares_around, CHAN, steady=True),
    row(
        "recursive_doubling",
        "doubling",
        costs.allgather_logarithmic,
        THAKUR,
        crossing=host_crossing.far_most,
        supports=needs_power_of_two,
        steady=True,
    ),
    row("bruck", "bruck", costs.allgather_logarithmic, BRUCK, crossing=host_crossing.evenly),
    row(
        "neighbour_exchange",
        "neighbour_exchange",
        costs.allgather_neighbour_exchange,
        CHEN,
        crossing=host_crossing.neighbours,
        supports=needs_even,
        steady=True,
    ),
    row(
        "direct",
        "direct",
        costs.shares_in_windows,
        f"{CHAN} (its simple algorithm for short vectors, run for every root at once)",
        crossing=host_crossing.evenly,
        segmentable=False,
    ),
    row("circulant", "circulant", costs.allgather_logarithmic, TRAEFF, crossing=host_crossing.evenly, steady=True),
    row("swing", "swing", costs.allgather_swing, SWING, steady=True, supports=needs_power_of_two, **SHORT_WAYS),
    row("bine", "bine", costs.allgather_logarithmic, BINE, steady=True, supports=needs_power_of_two, **SHORT_WAYS),
    row("pat", "pat", costs.allgather_pat, JEAUGEY, steady=True, **SHORT_WAYS),
    row("torus", "torus", costs.allgather_torus, JAIN, steady=True, **SHORT_WAYS),
    row(
        "read",
        "mapped",
        costs.allgather_read,
        f"{SHAH} (the second phase of its two-phase all-pairs algorithm)",
        **MAPPED,
    ),
    commutative_only=False,
    varying=True,
)

GATHER = table(
    "gather",
    row("linear", "gather_scatter", costs.gather_linear, PJESIVAC, segmentable=False),
    row("binomial", "gather_scatter", costs.gather_binomial, CHAN),
    row("bine", "bine", costs.gather_bine, BINE, **SHORT_WAYS),
    row(
        "read",
        "mapped",
        costs.gather_read,
        f"{SHAH} (the second phase of its two-phase all-pairs algorithm, for one rank)",
        **MAPPED,
    ),
    commutative_only=False,
    varying=True,
)

SCATTER = table(
    "scatter",
    row("linear", "gather_scatter", costs.shares_in_windows, PJESIVAC, segmentable=False),
    row("binomial", "gather_scatter", costs.scatter_binomial, CHAN),
    row("bine", "bine", costs.scatter_bine, BINE, **SHORT_WAYS),
    commutative_only=False,
    varying=True,
)

# Only GPUs run this one: the native executor gives a rank that has no INPUT no partition of the root's.
SCATTER_ON_DEVICES = table(
    "scatter",
    row(
        "read",
        "mapped",
        costs.scatter_read,
        f"{GRAHAM} (its broadcast, out of the memory of the root itself, of one share to each rank)",
        **MAPPED,
    ),
    commutative_only=False,
    varying=True,
)

ALLTOALL = table(
    "alltoall",
    row(
        "pairwise",
        "pairwise",
        costs.shares_around,
        THAKUR,
        crossing=host_crossing.evenly,
        segmentable=False,
        varying=True,
    ),
    row(
        "direct",
        "pairwise",
        costs.shares_in_windows,
        THAKUR,
        crossing=host_crossing.evenly,
        segmentable=False,
        varying=True,
    ),
    row("bruck", "bruck", costs.alltoall_bruck, BRUCK, crossing=host_crossing.evenly),
    row(
        "read",
        "mapped",
        costs.allgather_read,
        f"{SHAH} (the second phase of its two-phase all-pairs algorithm, a block of each)",
        **MAPPED,
    ),
    commutative_only=False,
    in_place=False,
)

BARRIER = table(
    "barrier",
    row("dissemination", "dissemination", costs.barrier_dissemination, HENSGEN, crossing=host_crossing.evenly),
    row(
        "direct",
        "direct",
        costs.barrier_direct,
        f"{MELLOR_CRUMMEY} (its dissemination barrier, in a single round)",
        crossing=host_crossing.evenly,
    ),
    row("tree", "tree", costs.barrier_tree, MELLOR_CRUMMEY),
    row("flags", "mapped", costs.barrier_flags, f"{GRAHAM} (its fan-in and fan-out, by all ranks at once)", **MAPPED),
    commutative_only=False,
    segmentable=False,
)
