"""The entries of the registry for the collectives that reduce, with their costs in closed form.

p is the number of ranks, and the vector that costs are multiples of is the INPUT of a rank. A rooted algorithm has the
cost of its most expensive root. A cost takes those parameters of its builder that it depends on, and ignores others.
"""

from __future__ import annotations

from unisono.algorithms.algorithm import Algorithm, Cost
from unisono.algorithms.balanced_tree import allreduce_balanced_tree
from unisono.algorithms.chain import allreduce_chain, reduce_chain
from unisono.algorithms.circulant import allreduce_circulant, reduce_scatter_circulant
from unisono.algorithms.direct import allreduce_direct, reduce_scatter_direct
from unisono.algorithms.double_tree import allreduce_double_binary_tree, reduce_double_binary_tree
from unisono.algorithms.doubling import allreduce_recursive_doubling
from unisono.algorithms.folding import fold
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
)
from unisono.algorithms.ring import (
    allreduce_bidirectional_ring,
    allreduce_multi_lane_ring,
    allreduce_ring,
    reduce_scatter_ring,
)
from unisono.algorithms.scan import exscan_linear, exscan_recursive_doubling, scan_linear, scan_recursive_doubling
from unisono.algorithms.tree import reduce_binomial


def _floor_log2(size: int) -> int:
    return size.bit_length() - 1


def _ceil_log2(size: int) -> int:
    return (size - 1).bit_length()


def _others(size: int) -> float:
    """Return what all ranks but one have of the vector."""
    return (size - 1) / size


def _windows(size: int, window: int) -> int:
    """Return how many windows it takes to exchange with all other ranks."""
    return -(-(size - 1) // window)


def _cost_of_direct(size: int, window: int = 32) -> Cost:
    return Cost(rounds=_windows(size, window), sent=size - 1, reduced=size - 1)


def _cost_of_ring(size: int, lanes: int = 2) -> Cost:
    """Rings side by side share the vector out, and take the same time each."""
    return Cost(rounds=2 * (size - 1), sent=2 * (size - 1) / size, reduced=_others(size))


def _cost_of_recursive_doubling(size: int) -> Cost:
    """The busiest rank of a folded pair combines once more and sends once more; it waits for both, two more rounds."""
    rounds, fold = _folded(size)
    return Cost(rounds=rounds + 2 * fold, sent=rounds + fold, reduced=rounds + fold)


def _cost_of_recursive_multiplying(size: int, radix: int = 4) -> Cost:
    """Each round exchanges with k - 1 others; the longest run of folded ranks has ⌈p / k^rounds⌉."""
    folding = fold(size, max(2, min(radix, size)))
    exchanged = folding.rounds * (folding.radix - 1)
    aside = -(-size // folding.positions) - 1
    return Cost(rounds=folding.rounds + 2 * (aside > 0), sent=exchanged + aside, reduced=exchanged + aside)


def _cost_of_rabenseifner(size: int) -> Cost:
    rounds, fold = _folded(size)
    moved = _others(1 << rounds)
    return Cost(rounds=2 * (rounds + fold), sent=2 * moved + fold, reduced=moved + fold)


def _cost_of_circulant(size: int) -> Cost:
    return Cost(rounds=2 * _ceil_log2(size), sent=2 * (size - 1) / size, reduced=_others(size))


def _cost_of_reduce_broadcast(size: int) -> Cost:
    """A rank inside the tree sends one vector up and two down; four ranks have one that is not the top."""
    return Cost(rounds=2 * _floor_log2(size), sent=min(3, size - 1), reduced=min(2, size - 1))


def _cost_of_chain(size: int) -> Cost:
    return Cost(rounds=2 * (size - 1), sent=min(2, size - 1), reduced=min(1, size - 1))


def _cost_of_double_binary_tree(size: int) -> Cost:
    """Half of the vector three times inside one tree, and once as a leaf of the other."""
    return Cost(rounds=2 * _floor_log2(size), sent=min(4, size) / 2 if size > 1 else 0, reduced=min(2, size - 1) / 2)


def _cost_of_balanced_tree(size: int, window: int = 32) -> Cost:
    return Cost(rounds=2 * _windows(size, window), sent=2 * (size - 1) / size, reduced=_others(size))


def _cost_of_one_shot(size: int, window: int = 32) -> Cost:
    """All ranks meet twice; what is read of others counts as sent."""
    return Cost(rounds=2 * _windows(size, window), sent=size - 1, reduced=size - 1)


def _cost_of_two_shot(size: int, window: int = 32) -> Cost:
    """All ranks meet three times."""
    return Cost(rounds=3 * _windows(size, window), sent=2 * (size - 1) / size, reduced=_others(size))


def _cost_of_binomial_reduce(size: int) -> Cost:
    """Rank 0 as the root receives in every round."""
    return Cost(rounds=_ceil_log2(size), sent=min(1, size - 1), reduced=_ceil_log2(size))


def _cost_of_chain_reduce(size: int) -> Cost:
    return Cost(rounds=size - 1, sent=min(1, size - 1), reduced=min(1, size - 1))


def _cost_of_binary_reduce(size: int) -> Cost:
    """Rank 0 as the root has all others in one tree, of depth ⌊log2(p - 1)⌋, below it."""
    return Cost(rounds=_ceil_log2(size), sent=min(1, size - 1), reduced=min(2, size - 1))


def _cost_of_rabenseifner_reduce(size: int) -> Cost:
    """A rank next to the root's side hands half of the vector over in the last round of the gather."""
    rounds, fold = _folded(size)
    moved = _others(1 << rounds)
    return Cost(rounds=2 * rounds + fold, sent=moved + 0.5 * (size > 1), reduced=moved + fold)


def _cost_of_double_binary_tree_reduce(size: int) -> Cost:
    """The trees have a depth of ⌊log2(p - 1)⌋, and the root is above them."""
    return Cost(rounds=_ceil_log2(size), sent=min(1, size - 1), reduced=min(1, size - 1))


def _cost_of_recursive_halving(size: int) -> Cost:
    """The first ranks are folded in pairs; the first pair keeps as much as any in every round.

    A rank that stands aside sends the vector, and what the others send adds up to the vector but for their own block.
    """
    rounds, fold = _folded(size)
    pairs = size - (1 << rounds)
    kept = sum((1 << bit) + min(1 << bit, pairs) for bit in range(rounds))
    return Cost(rounds=rounds + 2 * fold, sent=1 if fold else _others(size), reduced=(fold * size + kept) / size)


def _cost_of_rounds_around(size: int) -> Cost:
    return Cost(rounds=size - 1, sent=_others(size), reduced=_others(size))


def _cost_of_circulant_reduce_scatter(size: int) -> Cost:
    return Cost(rounds=_ceil_log2(size), sent=_others(size), reduced=_others(size))


def _cost_of_direct_reduce_scatter(size: int, window: int = 32) -> Cost:
    return Cost(rounds=_windows(size, window), sent=_others(size), reduced=_others(size))


def _cost_of_linear_scan(size: int) -> Cost:
    return Cost(rounds=size - 1, sent=min(1, size - 1), reduced=min(1, size - 1))


def _cost_of_linear_exscan(size: int) -> Cost:
    """Only the ranks between the first and the last combine."""
    return Cost(rounds=size - 1, sent=min(1, size - 1), reduced=min(1, max(0, size - 2)))


def _cost_of_doubling_scan(size: int) -> Cost:
    return Cost(rounds=_ceil_log2(size), sent=_ceil_log2(size), reduced=_ceil_log2(size))


def _cost_of_doubling_exscan(size: int) -> Cost:
    """One round to pass contributions on, then the scan of p - 1 ranks."""
    first = min(1, size - 1)
    rounds = _ceil_log2(max(1, size - 1))
    return Cost(rounds=first + rounds, sent=first + rounds, reduced=rounds)


def _folded(size: int) -> tuple[int, int]:
    """Return ⌊log2 p⌋, and 1 if p is more than that power of two, so that some ranks are folded, else 0."""
    rounds = _floor_log2(size)
    return rounds, int(size > 1 << rounds)


ALLREDUCE: dict[str, Algorithm] = {
    "direct": Algorithm(
        collective="allreduce",
        name="direct",
        build=allreduce_direct,
        cost=_cost_of_direct,
        reference=f"{CHAN} (its simple algorithm for short vectors, run for every root at once)",
        commutative_only=False,
        order="rank",
    ),
    "ring": Algorithm(
        collective="allreduce",
        name="ring",
        build=allreduce_ring,
        cost=_cost_of_ring,
        reference=CHAN,
        order="fixed",
    ),
    "recursive_doubling": Algorithm(
        collective="allreduce",
        name="recursive_doubling",
        build=allreduce_recursive_doubling,
        cost=_cost_of_recursive_doubling,
        reference=THAKUR,
        commutative_only=False,
        order="fixed",
    ),
    "bidirectional_ring": Algorithm(
        collective="allreduce",
        name="bidirectional_ring",
        build=allreduce_bidirectional_ring,
        cost=_cost_of_ring,
        reference=JAIN,
        order="fixed",
    ),
    "multi_lane_ring": Algorithm(
        collective="allreduce",
        name="multi_lane_ring",
        build=allreduce_multi_lane_ring,
        cost=_cost_of_ring,
        reference=MULTI_LANE,
        order="fixed",
    ),
    "recursive_multiplying": Algorithm(
        collective="allreduce",
        name="recursive_multiplying",
        build=allreduce_recursive_multiplying,
        cost=_cost_of_recursive_multiplying,
        reference=RUEFENACHT,
        commutative_only=False,
        order="fixed",
    ),
    "rabenseifner": Algorithm(
        collective="allreduce",
        name="rabenseifner",
        build=allreduce_rabenseifner,
        cost=_cost_of_rabenseifner,
        reference=RABENSEIFNER,
        commutative_only=False,
        order="fixed",
    ),
    "circulant": Algorithm(
        collective="allreduce",
        name="circulant",
        build=allreduce_circulant,
        cost=_cost_of_circulant,
        reference=TRAEFF,
        order="fixed",
    ),
    "reduce_broadcast": Algorithm(
        collective="allreduce",
        name="reduce_broadcast",
        build=allreduce_reduce_broadcast,
        cost=_cost_of_reduce_broadcast,
        reference=f"{PJESIVAC} (its in-order binary reduce, and the broadcast down the same tree)",
        commutative_only=False,
        order="fixed",
    ),
    "chain": Algorithm(
        collective="allreduce",
        name="chain",
        build=allreduce_chain,
        cost=_cost_of_chain,
        reference=f"{PJESIVAC} (its pipelined reduce, and the broadcast back)",
        commutative_only=False,
        order="fixed",
    ),
    "double_binary_tree": Algorithm(
        collective="allreduce",
        name="double_binary_tree",
        build=allreduce_double_binary_tree,
        cost=_cost_of_double_binary_tree,
        reference=SANDERS,
        order="fixed",
    ),
    "balanced_tree": Algorithm(
        collective="allreduce",
        name="balanced_tree",
        build=allreduce_balanced_tree,
        cost=_cost_of_balanced_tree,
        reference=f"{CHAN} (the two exchanges); {ARTEAGA} (the order)",
        commutative_only=False,
        order="fixed",
        segmentable=False,
        by_name_only=True,  # each of its rounds is a message to every rank, which the model takes for one latency
    ),
    "one_shot": Algorithm(
        collective="allreduce",
        name="one_shot",
        build=allreduce_one_shot,
        cost=_cost_of_one_shot,
        reference=f"{SHAH} (its one-phase all-pairs algorithm)",
        commutative_only=False,
        order="rank",
        segmentable=False,
        mapped=True,
    ),
    "two_shot": Algorithm(
        collective="allreduce",
        name="two_shot",
        build=allreduce_two_shot,
        cost=_cost_of_two_shot,
        reference=f"{SHAH} (its two-phase all-pairs algorithm)",
        commutative_only=False,
        order="rank",
        segmentable=False,
        mapped=True,
    ),
}

REDUCE: dict[str, Algorithm] = {
    "binomial": Algorithm(
        collective="reduce",
        name="binomial",
        build=reduce_binomial,
        cost=_cost_of_binomial_reduce,
        reference=THAKUR,
        commutative_only=False,
        order="fixed",
    ),
    "chain": Algorithm(
        collective="reduce",
        name="chain",
        build=reduce_chain,
        cost=_cost_of_chain_reduce,
        reference=PJESIVAC,
        order="fixed",
    ),
    "binary": Algorithm(
        collective="reduce",
        name="binary",
        build=reduce_binary,
        cost=_cost_of_binary_reduce,
        reference=PJESIVAC,
        commutative_only=False,
        order="fixed",
    ),
    "rabenseifner": Algorithm(
        collective="reduce",
        name="rabenseifner",
        build=reduce_rabenseifner,
        cost=_cost_of_rabenseifner_reduce,
        reference=RABENSEIFNER,
        commutative_only=False,
        order="fixed",
    ),
    "double_binary_tree": Algorithm(
        collective="reduce",
        name="double_binary_tree",
        build=reduce_double_binary_tree,
        cost=_cost_of_double_binary_tree_reduce,
        reference=SANDERS,
        order="fixed",
    ),
}

REDUCE_SCATTER: dict[str, Algorithm] = {
    "recursive_halving": Algorithm(
        collective="reduce_scatter",
        name="recursive_halving",
        build=reduce_scatter_recursive_halving,
        cost=_cost_of_recursive_halving,
        reference=THAKUR,
        order="fixed",
        varying=True,
    ),
    "ring": Algorithm(
        collective="reduce_scatter",
        name="ring",
        build=reduce_scatter_ring,
        cost=_cost_of_rounds_around,
        reference=CHAN,
        order="fixed",
        varying=True,
    ),
    "pairwise": Algorithm(
        collective="reduce_scatter",
        name="pairwise",
        build=reduce_scatter_pairwise,
        cost=_cost_of_rounds_around,
        reference=THAKUR,
        order="fixed",
        varying=True,
    ),
    "circulant": Algorithm(
        collective="reduce_scatter",
        name="circulant",
        build=reduce_scatter_circulant,
        cost=_cost_of_circulant_reduce_scatter,
        reference=TRAEFF,
        order="fixed",
        varying=True,
    ),
    "direct": Algorithm(
        collective="reduce_scatter",
        name="direct",
        build=reduce_scatter_direct,
        cost=_cost_of_direct_reduce_scatter,
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
        cost=_cost_of_linear_scan,
        reference=SCAN_OF_MPI,
        commutative_only=False,
        order="rank",
    ),
    "recursive_doubling": Algorithm(
        collective="scan",
        name="recursive_doubling",
        build=scan_recursive_doubling,
        cost=_cost_of_doubling_scan,
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
        cost=_cost_of_linear_exscan,
        reference=SCAN_OF_MPI,
        commutative_only=False,
        order="rank",
    ),
    "recursive_doubling": Algorithm(
        collective="exscan",
        name="recursive_doubling",
        build=exscan_recursive_doubling,
        cost=_cost_of_doubling_exscan,
        reference=HILLIS,
        commutative_only=False,
        order="fixed",
    ),
}
