"""The table rows of the algorithms that are composed of phases.

A composition declares its phases. The cost of a phase is the closed form of its algorithm, multiplied by the fraction
of the vector on which a group works. A tuner that knows the links inside hosts and between hosts can therefore choose
the algorithm of each phase separately.

The tuner chooses only among algorithms whose plans stay small as phases. A ring, for example, is not among them across
hosts of different sizes: the leaders are then not evenly spaced, so the plan would contain every step of the ring.
"""

from __future__ import annotations

from math import prod

from unisono.algorithms.catalogue.algorithm import Algorithm, Builder, Cost
from unisono.algorithms.catalogue.references import LUO, MULTI_LANE, SCAN_OF_MPI, TRAEFF_ROUGIER
from unisono.algorithms.composition.host_levels import Levels, needs_equal, needs_runs, two_levels_of
from unisono.algorithms.composition.phases import Composition, PhaseKind


def _share_after_inner_levels(levels: Levels, level: int, size: int) -> float:
    """Return the fraction of the vector on which a group of ranks works at `level` of a full-lane allreduce.

    Each level inside `level` has split the vector into a share for each part of its largest host. For example, the
    fraction is 1/8 across hosts of 8 ranks.
    """
    return 1 / prod(max(sizes) for sizes in levels.sizes[level + 1 :])


def _shares_of_widest_members(levels: Levels, level: int, size: int) -> float:
    """Return the fraction of the vector on which a group of `size` ranks works at `level`, as an upper bound.

    Each of these ranks works on the shares of its own part of the host. The largest part has as many shares as ranks.
    """
    return size * levels.widest[level] / levels.size


def _between_scans(levels: Levels) -> Cost:
    """Return the cost between the phases of a scan: a rank combines the total of earlier hosts with its own prefix."""
    return Cost(rounds=0, sent=0, reduced=int(max(levels.sizes[0]) > 1))


def _between_exscans(levels: Levels) -> Cost:
    """Return the cost between the phases of an exscan.

    Each rank combines once, as in a scan. The last rank of a host combines once more, to get the total of its host; on
    the last host it does not, because no host follows.
    """
    number, ranks = max(levels.sizes[0]), max(levels.sizes[-1])
    return Cost(rounds=0, sent=0, reduced=(min(number, 3) - 1) * int(ranks > 1))


def _needs_equal_runs(levels: Levels) -> str | None:
    return needs_runs(levels) or needs_equal(levels)


_REDUCE = PhaseKind("reduce", "reduce", is_inside=True, algorithms=("binomial", "knomial", "chain", "binary"))
_BROADCAST = PhaseKind("broadcast", "broadcast", is_inside=True, algorithms=("binomial", "knomial", "chain", "binary"))
_ACROSS_SCANS = PhaseKind("across", "exscan", is_inside=False, algorithms=("recursive_doubling", "linear"))

COMPOSED: dict[str, dict[str, Algorithm]] = {
    "allreduce": {
        "hierarchical": Composition(
            collective="allreduce",
            name="hierarchical",
            build=Builder("composition.hierarchical", "allreduce_hierarchical"),
            reference=LUO,
            order="fixed",
            is_cost_exact=False,
            phases=(
                _REDUCE,
                PhaseKind(
                    "across",
                    "allreduce",
                    is_inside=False,
                    algorithms=("recursive_doubling", "direct", "rabenseifner", "circulant"),
                ),
                _BROADCAST,
            ),
        ),
        "full_lane": Composition(
            collective="allreduce",
            name="full_lane",
            build=Builder("composition.hierarchical", "allreduce_full_lane"),
            reference=MULTI_LANE,
            order="fixed",
            is_cost_exact=False,
            phases=(
                PhaseKind(
                    "reduce_scatter",
                    "reduce_scatter",
                    is_inside=True,
                    algorithms=("ring", "recursive_halving"),
                    fraction=_share_after_inner_levels,
                ),
                PhaseKind(
                    "across",
                    "allreduce",
                    is_inside=False,
                    algorithms=("ring", "recursive_doubling", "direct", "rabenseifner"),
                    fraction=_share_after_inner_levels,
                    by_all=True,
                ),
                PhaseKind(
                    "allgather",
                    "allgather",
                    is_inside=True,
                    algorithms=("ring", "circulant"),
                    fraction=_share_after_inner_levels,
                ),
            ),
            needs=needs_equal,
        ),
    },
    "reduce": {
        "hierarchical": Composition(
            collective="reduce",
            name="hierarchical",
            build=Builder("composition.hierarchical", "reduce_hierarchical"),
            reference=LUO,
            order="fixed",
            is_cost_exact=False,
            phases=(
                _REDUCE,
                PhaseKind(
                    "across", "reduce", is_inside=False, algorithms=("binomial", "knomial", "chain", "rabenseifner")
                ),
            ),
        ),
    },
    "reduce_scatter": {
        "hierarchical": Composition(
            collective="reduce_scatter",
            name="hierarchical",
            build=Builder("composition.hierarchical", "reduce_scatter_hierarchical"),
            reference=LUO,
            order="fixed",
            varying=True,
            is_cost_exact=False,
            phases=(
                _REDUCE,
                PhaseKind(
                    "across",
                    "reduce_scatter",
                    is_inside=False,
                    algorithms=("recursive_halving",),
                    fraction=_shares_of_widest_members,
                ),
                PhaseKind(
                    "scatter",
                    "scatter",
                    is_inside=True,
                    algorithms=("binomial", "linear"),
                    fraction=_shares_of_widest_members,
                ),
            ),
            needs=needs_runs,
        ),
    },
    "broadcast": {
        "hierarchical": Composition(
            collective="broadcast",
            name="hierarchical",
            build=Builder("composition.hierarchical", "broadcast_hierarchical"),
            reference=LUO,
            commutative_only=False,
            is_cost_exact=False,
            phases=(
                PhaseKind(
                    "across", "broadcast", is_inside=False, algorithms=("binomial", "knomial", "chain", "scatter_ring")
                ),
                _BROADCAST,
            ),
        ),
    },
    "allgather": {
        "hierarchical": Composition(
            collective="allgather",
            name="hierarchical",
            build=Builder("composition.hierarchical", "allgather_hierarchical"),
            reference=LUO,
            commutative_only=False,
            varying=True,
            is_cost_exact=False,
            phases=(
                PhaseKind(
                    "gather",
                    "gather",
                    is_inside=True,
                    algorithms=("binomial", "linear"),
                    fraction=_shares_of_widest_members,
                ),
                PhaseKind(
                    "across",
                    "allgather",
                    is_inside=False,
                    algorithms=("circulant",),
                    fraction=_shares_of_widest_members,
                ),
                _BROADCAST,
            ),
            needs=needs_runs,
        ),
    },
    "barrier": {
        "hierarchical": Composition(
            collective="barrier",
            name="hierarchical",
            build=Builder("composition.hierarchical", "barrier_hierarchical"),
            reference=LUO,
            commutative_only=False,
            segmentable=False,
            is_cost_exact=False,
            phases=(
                PhaseKind("inside", "barrier", is_inside=True, algorithms=("dissemination", "direct", "tree"), times=2),
                PhaseKind("across", "barrier", is_inside=False, algorithms=("dissemination", "tree")),
            ),
        ),
    },
    "alltoall": {
        "two_level": Composition(
            collective="alltoall",
            name="two_level",
            build=Builder("composition.two_level", "alltoall_two_level"),
            reference=TRAEFF_ROUGIER,
            commutative_only=False,
            in_place=False,
            segmentable=False,
            phases=(
                PhaseKind("inside", "alltoall", is_inside=True, algorithms=("direct", "pairwise")),
                PhaseKind("across", "alltoall", is_inside=False, algorithms=("pairwise", "direct"), by_all=True),
            ),
            levels=two_levels_of,
            needs=_needs_equal_runs,
        ),
    },
    "scan": {
        "two_level": Composition(
            collective="scan",
            name="two_level",
            build=Builder("composition.two_level", "scan_two_level"),
            reference=SCAN_OF_MPI,
            commutative_only=False,
            order="fixed",
            is_cost_exact=False,
            phases=(
                PhaseKind("inside", "scan", is_inside=True, algorithms=("recursive_doubling", "linear")),
                _ACROSS_SCANS,
                _BROADCAST,
            ),
            levels=two_levels_of,
            between=_between_scans,
            needs=needs_runs,
        ),
    },
    "exscan": {
        "two_level": Composition(
            collective="exscan",
            name="two_level",
            build=Builder("composition.two_level", "exscan_two_level"),
            reference=SCAN_OF_MPI,
            commutative_only=False,
            order="fixed",
            is_cost_exact=False,
            phases=(
                PhaseKind("inside", "exscan", is_inside=True, algorithms=("recursive_doubling", "linear")),
                _ACROSS_SCANS,
                _BROADCAST,
            ),
            levels=two_levels_of,
            between=_between_exscans,
            needs=needs_runs,
        ),
    },
}
