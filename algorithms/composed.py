"""The entries of the registry for the algorithms that are composed of phases, with their costs.

The cost of a composition is made of the closed forms of its phases, on the fraction of the vector that each works on,
and the most expensive group of each level. It is a bound where the busiest ranks of the phases need not be the same.

Costs know one kind of link, and these algorithms are for more than one kind. So they run where they are named only, and
without `hosts` on equal runs of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from unisono.algorithms.algorithm import Algorithm, Cost
from unisono.algorithms.hierarchical import (
    allreduce_full_lane,
    allreduce_hierarchical,
    barrier_hierarchical,
    broadcast_hierarchical,
    reduce_hierarchical,
)
from unisono.algorithms.hosts import Hosts, Levels, equal_hosts, in_lanes, led_by, ranks_of
from unisono.algorithms.references import LUO, MULTI_LANE, SCAN_OF_MPI, TRAEFF_ROUGIER
from unisono.algorithms.teams import Method, Names, inner_methods, method
from unisono.algorithms.two_level import alltoall_two_level, exscan_two_level, scan_two_level


def _cost_of_phase(used: Method, sizes: frozenset[int], fraction: float = 1.0) -> Cost:
    """Return the cost of a phase on a fraction of the vector: that of its most expensive group."""
    costs = [cost for size in sizes if (cost := used.algorithm.cost_of(size, {})) is not None]
    return Cost(
        rounds=max(cost.rounds for cost in costs),
        sent=fraction * max(cost.sent for cost in costs),
        reduced=fraction * max(cost.reduced for cost in costs),
    )


def _sum(*costs: Cost) -> Cost:
    return Cost(
        rounds=sum(cost.rounds for cost in costs),
        sent=sum(cost.sent for cost in costs),
        reduced=sum(cost.reduced for cost in costs),
    )


def _inside(collective: str, names: Names, levels: Levels) -> Iterator[Cost]:
    """Yield the cost of each level inside hosts, from the outside."""
    for used, sizes in zip(inner_methods(collective, names, levels), levels.sizes[1:], strict=True):
        yield _cost_of_phase(used, sizes)


def _across(collective: str, name: str, levels: Levels, fraction: float = 1.0) -> Cost:
    return _cost_of_phase(method(collective, name, levels.sizes[0]), levels.sizes[0], fraction)


def _led(size: int, hosts: Hosts | None) -> Levels:
    return led_by(equal_hosts(size) if hosts is None else hosts, size)


def _cost_of_hierarchical_allreduce(
    size: int,
    hosts: Hosts | None = None,
    reduce: Names = "binomial",
    across: str = "recursive_doubling",
    broadcast: Names = "binomial",
) -> Cost:
    levels = _led(size, hosts)
    inside = (*_inside("reduce", reduce, levels), *_inside("broadcast", broadcast, levels))
    return _sum(_across("allreduce", across, levels), *inside)


def _cost_of_hierarchical_reduce(
    size: int, hosts: Hosts | None = None, reduce: Names = "binomial", across: str = "binomial"
) -> Cost:
    levels = _led(size, hosts)
    return _sum(_across("reduce", across, levels), *_inside("reduce", reduce, levels))


def _cost_of_hierarchical_broadcast(
    size: int, hosts: Hosts | None = None, across: str = "binomial", broadcast: Names = "binomial"
) -> Cost:
    levels = _led(size, hosts)
    return _sum(_across("broadcast", across, levels), *_inside("broadcast", broadcast, levels))


def _cost_of_hierarchical_barrier(
    size: int, hosts: Hosts | None = None, inside: Names = "dissemination", across: str = "dissemination"
) -> Cost:
    levels = _led(size, hosts)
    inner = tuple(_inside("barrier", inside, levels))
    return _sum(_across("barrier", across, levels), *inner, *inner)


def _cost_of_full_lane(
    size: int,
    hosts: Hosts | None = None,
    reduce_scatter: Names = "ring",
    across: str = "ring",
    allgather: Names = "ring",
) -> Cost:
    """Each level works on what the levels inside it have left of the vector."""
    levels = in_lanes(equal_hosts(size) if hosts is None else hosts, size)
    ranks = [max(sizes) for sizes in levels.sizes]
    left = [1 / prod(ranks[level + 1 :]) for level in range(len(ranks))]
    inside = [
        _cost_of_phase(used, levels.sizes[level], left[level])
        for collective, names in (("reduce_scatter", reduce_scatter), ("allgather", allgather))
        for level, used in enumerate(inner_methods(collective, names, levels), start=1)
    ]
    return _sum(_across("allreduce", across, levels, left[0]), *inside)


def _runs(size: int, hosts: Hosts | None) -> tuple[frozenset[int], frozenset[int]]:
    """Return how many hosts there are, and how many ranks they have."""
    runs = [ranks_of(host) for host in (equal_hosts(size) if hosts is None else hosts)]
    return frozenset((len(runs),)), frozenset(map(len, runs))


def _cost_of_alltoall(size: int, hosts: Hosts | None = None, inside: str = "direct", across: str = "pairwise") -> Cost:
    """Both phases move all but a rank's own share of what it has for others."""
    number, ranks = _runs(size, hosts)
    phases = (("alltoall", inside, ranks), ("alltoall", across, number))
    return _sum(*(_cost_of_phase(method(*phase), phase[-1]) for phase in phases))


def _cost_of_scan(
    size: int,
    hosts: Hosts | None = None,
    inside: str = "recursive_doubling",
    across: str = "recursive_doubling",
    broadcast: str = "binomial",
) -> Cost:
    """One more combination puts together what the hosts before and the ranks before contribute."""
    number, ranks = _runs(size, hosts)
    phases = (("scan", inside, ranks), ("exscan", across, number), ("broadcast", broadcast, ranks))
    finish = Cost(rounds=0, sent=0, reduced=int(max(number) > 1))
    return _sum(finish, *(_cost_of_phase(method(*phase), phase[-1]) for phase in phases))


def _cost_of_exscan(
    size: int,
    hosts: Hosts | None = None,
    inside: str = "recursive_doubling",
    across: str = "recursive_doubling",
    broadcast: str = "binomial",
) -> Cost:
    """The last rank of a host combines what all its host contributes, too."""
    number, ranks = _runs(size, hosts)
    phases = (("exscan", inside, ranks), ("exscan", across, number), ("broadcast", broadcast, ranks))
    finish = Cost(rounds=0, sent=0, reduced=int(max(number) > 1) + int(max(ranks) > 1))
    return _sum(finish, *(_cost_of_phase(method(*phase), phase[-1]) for phase in phases))


COMPOSED: dict[str, dict[str, Algorithm]] = {
    "allreduce": {
        "hierarchical": Algorithm(
            collective="allreduce",
            name="hierarchical",
            build=allreduce_hierarchical,
            cost=_cost_of_hierarchical_allreduce,
            reference=LUO,
            order="fixed",
            is_cost_exact=False,
            by_name_only=True,
        ),
        "full_lane": Algorithm(
            collective="allreduce",
            name="full_lane",
            build=allreduce_full_lane,
            cost=_cost_of_full_lane,
            reference=MULTI_LANE,
            order="fixed",
            is_cost_exact=False,
            by_name_only=True,
        ),
    },
    "reduce": {
        "hierarchical": Algorithm(
            collective="reduce",
            name="hierarchical",
            build=reduce_hierarchical,
            cost=_cost_of_hierarchical_reduce,
            reference=LUO,
            order="fixed",
            is_cost_exact=False,
            by_name_only=True,
        ),
    },
    "broadcast": {
        "hierarchical": Algorithm(
            collective="broadcast",
            name="hierarchical",
            build=broadcast_hierarchical,
            cost=_cost_of_hierarchical_broadcast,
            reference=LUO,
            commutative_only=False,
            is_cost_exact=False,
            by_name_only=True,
        ),
    },
    "barrier": {
        "hierarchical": Algorithm(
            collective="barrier",
            name="hierarchical",
            build=barrier_hierarchical,
            cost=_cost_of_hierarchical_barrier,
            reference=LUO,
            commutative_only=False,
            segmentable=False,
            is_cost_exact=False,
            by_name_only=True,
        ),
    },
    "alltoall": {
        "two_level": Algorithm(
            collective="alltoall",
            name="two_level",
            build=alltoall_two_level,
            cost=_cost_of_alltoall,
            reference=TRAEFF_ROUGIER,
            commutative_only=False,
            in_place=False,
            segmentable=False,
            by_name_only=True,
        ),
    },
    "scan": {
        "two_level": Algorithm(
            collective="scan",
            name="two_level",
            build=scan_two_level,
            cost=_cost_of_scan,
            reference=SCAN_OF_MPI,
            commutative_only=False,
            order="fixed",
            is_cost_exact=False,
            by_name_only=True,
        ),
    },
    "exscan": {
        "two_level": Algorithm(
            collective="exscan",
            name="two_level",
            build=exscan_two_level,
            cost=_cost_of_exscan,
            reference=SCAN_OF_MPI,
            commutative_only=False,
            order="fixed",
            is_cost_exact=False,
            by_name_only=True,
        ),
    },
}
