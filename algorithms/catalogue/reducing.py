"""The table rows of the collectives that reduce. Their costs are in `catalogue.costs`."""

from __future__ import annotations

from functools import partial

from unisono.algorithms.catalogue import costs, host_crossing
from unisono.algorithms.catalogue.references import (
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
from unisono.algorithms.catalogue.rows import MAPPED, row, table

ALLREDUCE = table(
    "allreduce",
    row(
        "direct",
        "direct",
        costs.allreduce_direct,
        f"{CHAN} (its simple algorithm for short vectors, run for every root at once)",
        crossing=host_crossing.evenly,
        commutative_only=False,
        order="at_once",
    ),
    row("ring", "ring", costs.allreduce_ring, CHAN, order="fixed", steady=True),
    row(
        "recursive_doubling",
        "doubling",
        costs.allreduce_recursive_doubling,
        THAKUR,
        crossing=host_crossing.doubling,
        commutative_only=False,
        order="fixed",
        steady=True,
    ),
    row("bidirectional_ring", "ring", costs.allreduce_rings, JAIN, order="fixed", steady=True),
    row("multi_lane_ring", "ring", costs.allreduce_rings, MULTI_LANE, order="fixed", steady=True),
    row(
        "recursive_multiplying",
        "multiplying",
        costs.allreduce_recursive_multiplying,
        RUEFENACHT,
        crossing=partial(host_crossing.doubling, radix=4),
        commutative_only=False,
        order="fixed",
        steady=True,
    ),
    row(
        "rabenseifner",
        "rabenseifner",
        costs.allreduce_rabenseifner,
        RABENSEIFNER,
        crossing=host_crossing.near_most,
        commutative_only=False,
        order="fixed",
        steady=True,
    ),
    row(
        "circulant",
        "circulant",
        costs.allreduce_circulant,
        TRAEFF,
        crossing=host_crossing.evenly,
        order="fixed",
        steady=True,
    ),
    row(
        "reduce_broadcast",
        "in_order_tree",
        costs.allreduce_reduce_broadcast,
        f"{PJESIVAC} (its in-order binary reduce, and the broadcast down the same tree)",
        commutative_only=False,
        order="fixed",
    ),
    row(
        "chain",
        "chain",
        costs.allreduce_chain,
        f"{PJESIVAC} (its pipelined reduce, and the broadcast back)",
        commutative_only=False,
        order="fixed",
    ),
    row("double_binary_tree", "double_tree", costs.allreduce_double_binary_tree, SANDERS, order="fixed"),
    row(
        "balanced_tree",
        "balanced_tree",
        costs.allreduce_two_exchanges,
        f"{CHAN} (the two exchanges); {ARTEAGA} (the order)",
        crossing=host_crossing.evenly,
        commutative_only=False,
        order="canonical",
        segmentable=False,
        by_name_only=True,  # every round sends a message to each rank, but the model counts one latency
        chosen_far=True,
    ),
    row(
        "all_pairs",
        "direct",
        costs.allreduce_two_exchanges,
        f"{SHAH} (its two-phase all-pairs algorithm, by messages)",
        crossing=host_crossing.evenly,
        commutative_only=False,
        order="at_once",
        segmentable=False,
        by_name_only=True,  # as the balanced tree
        chosen_far=True,
    ),
    row(
        "one_shot",
        "mapped",
        costs.allreduce_one_shot,
        f"{SHAH} (its one-phase all-pairs algorithm)",
        commutative_only=False,
        order="at_once",
        **MAPPED,
    ),
    row(
        "two_shot",
        "mapped",
        costs.allreduce_two_shot,
        f"{SHAH} (its two-phase all-pairs algorithm)",
        commutative_only=False,
        order="at_once",
        **MAPPED,
    ),
)

REDUCE = table(
    "reduce",
    row(
        "binomial",
        "tree",
        costs.reduce_binomial,
        THAKUR,
        crossing=host_crossing.up_tree,
        commutative_only=False,
        order="canonical",
    ),
    row(
        "knomial",
        "tree",
        costs.reduce_knomial,
        WILKINS,
        crossing=partial(host_crossing.up_tree, radix=4),
        commutative_only=False,
        order="fixed",
    ),
    row("chain", "chain", costs.reduce_chain, PJESIVAC, order="fixed"),
    row("binary", "in_order_tree", costs.reduce_binary, PJESIVAC, commutative_only=False, order="fixed"),
    row(
        "rabenseifner",
        "rabenseifner",
        costs.reduce_rabenseifner,
        RABENSEIFNER,
        crossing=host_crossing.near_most_to_root,
        commutative_only=False,
        order="fixed",
    ),
    row("double_binary_tree", "double_tree", costs.reduce_double_binary_tree, SANDERS, order="fixed"),
    row(
        "all_pairs",
        "direct",
        costs.reduce_all_pairs,
        f"{SHAH} (its two-phase all-pairs algorithm, by messages, of which the root alone gets the result)",
        crossing=host_crossing.evenly,
        commutative_only=False,
        order="at_once",
        segmentable=False,
        by_name_only=True,  # every round sends a message to each rank, but the model counts one latency
        chosen_far=True,
    ),
    row(
        "read",
        "mapped",
        costs.reduce_read,
        f"{SHAH} (the first phase of its two-phase all-pairs algorithm, for one rank)",
        commutative_only=False,
        order="at_once",
        **MAPPED,
    ),
)

# If the model predicts the same time for several algorithms, as between two ranks, the tuner takes the first one here.
# So the algorithm that copies least comes first.
REDUCE_SCATTER = table(
    "reduce_scatter",
    row("ring", "ring", costs.reduce_scatter_ring, CHAN, order="fixed", steady=True),
    row("pairwise", "pairwise", costs.reduce_scatter_pairwise, THAKUR, crossing=host_crossing.evenly, order="fixed"),
    row(
        "circulant",
        "circulant",
        costs.reduce_scatter_circulant,
        TRAEFF,
        crossing=host_crossing.evenly,
        order="fixed",
        steady=True,
    ),
    row(
        "recursive_halving",
        "rabenseifner",
        costs.reduce_scatter_recursive_halving,
        THAKUR,
        crossing=host_crossing.far_most,
        order="fixed",
        steady=True,
    ),
    row(
        "direct",
        "direct",
        costs.reduce_scatter_direct,
        f"{CHAN} (its simple algorithm for short vectors, run for every root at once)",
        crossing=host_crossing.evenly,
        commutative_only=False,
        order="at_once",
        segmentable=False,
    ),
    row(
        "balanced_tree",
        "balanced_tree",
        costs.reduce_scatter_balanced_tree,
        f"{CHAN} (the exchange); {ARTEAGA} (the order)",
        crossing=host_crossing.evenly,
        commutative_only=False,
        order="canonical",
        segmentable=False,
    ),
    row(
        "read",
        "mapped",
        costs.reduce_scatter_read,
        f"{SHAH} (the first phase of its two-phase all-pairs algorithm)",
        commutative_only=False,
        order="at_once",
        **MAPPED,
    ),
    varying=True,
)

_SIMPLE_SCAN = (
    f"{CHAN} (its simple algorithm for short vectors, in which each rank receives only from the ranks before it)"
)

SCAN = table(
    "scan",
    row("linear", "scan", costs.scan_linear, SCAN_OF_MPI, order="rank"),
    row(
        "recursive_doubling",
        "scan",
        costs.scan_recursive_doubling,
        HILLIS,
        crossing=host_crossing.evenly,
        order="fixed",
    ),
    row(
        "direct",
        "scan",
        costs.scan_direct,
        _SIMPLE_SCAN,
        crossing=host_crossing.evenly,
        order="at_once",
        by_name_only=True,  # every round sends a message to each rank, but the model counts one latency
        chosen_far=True,
    ),
    commutative_only=False,
)

EXSCAN = table(
    "exscan",
    row("linear", "scan", costs.exscan_linear, SCAN_OF_MPI, order="rank"),
    row(
        "recursive_doubling",
        "scan",
        costs.exscan_recursive_doubling,
        HILLIS,
        crossing=host_crossing.after_one_shift,
        order="fixed",
    ),
    row(
        "direct",
        "scan",
        costs.exscan_direct,
        _SIMPLE_SCAN,
        crossing=host_crossing.evenly,
        order="at_once",
        by_name_only=True,  # every round sends a message to each rank, but the model counts one latency
        chosen_far=True,
    ),
    commutative_only=False,
)
