"""Finds the order of hosts in which an algorithm takes the least time on a measured network.

Hosts that are far apart differ in delay and rate from pair to pair, and each way may differ from the way back. A ring
passes over as many ways as it has hosts. Long messages wait for its slowest way, and short ones for the sum of its
delays. A tree sends most over the ways near its root. So the order decides about the time, and it differs from size to
size.

The time of an order is that of the simulator, on the map of the network. All orders of up to 9 hosts are tried. Orders
of more hosts are improved step by step (`order_search.py`). This search starts from the order of ranks, from an order
that goes region by region to the nearest host, and from some orders at random. The first host is fixed: it is the root,
and a ring may begin anywhere.

All ranks find the same order, because they have the same map and compute with the same bits. The order is a part of
the signature of a call.

Open questions
--------------
Doubted: the line of a host is taken to be as fast as its fastest way, because hosts measure one pair at a time. So the
model does not know that two ways share a bottleneck outside of the hosts. `chain` keeps the order of ranks, because its
plan has no rounds, and the simulation of messages one by one is too slow for a search.

This would change our mind: ways whose rates fall when others are busy. Then the hosts should measure several pairs at a
time.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import permutations
from typing import Any

import numpy as np

from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.catalogue.registry import find
from unisono.algorithms.catalogue.variants import ORDER
from unisono.algorithms.composition.phases import Composition
from unisono.tuning.decide.order_search import improved
from unisono.tuning.machine.map_topology import MapTopology
from unisono.tuning.machine.network_map import NetworkMap
from unisono.tuning.machine.topology import Floats, Ranks
from unisono.tuning.simulator.orders import times_of
from unisono.tuning.simulator.simulate import simulate
from unisono.tuning.simulator.step_table import Schedule, schedule

# The algorithms that are reordered: their times depend on the order, and their plans have rounds.
ORDERED = frozenset({"ring", "bidirectional_ring", "binomial", "scatter_ring"})
# The algorithms that are reordered as phases across hosts of several ranks: those above, and two more.
_ORDERED_ACROSS = ORDERED | {"recursive_doubling", "rabenseifner"}
# All orders of up to _ALL_ORDERS hosts are tried, if that takes at most _MOST_ROUNDS rounds of ranks.
_ALL_ORDERS, _MOST_ROUNDS = 9, 6_000_000
# Of more hosts, the search also starts from this many random orders, which are the same on all ranks.
_SHUFFLES = 6
# An order replaces the order of ranks if it takes less than this part of its time, because measured maps differ a bit.
_BETTER = 0.98
# The most segments of a simulation, because its time grows with them. With more segments, a pipeline of a few hosts
# takes hardly less time. A search simulates one segment.
_MOST_SEGMENTS = 32
# Of two orders that take equally long, the one that occupies the ways for less time is better. So the search leaves
# orders that share a bottleneck.
_BUSY = 0.01


def best_order(collective: str, algorithm: str, network: NetworkMap, nbytes: int, first: int = 0) -> tuple[int, ...]:
    """Return the order of hosts, beginning with `first`, in which an algorithm of `ORDERED` takes the least time.

    Of more than 9 hosts it need not be the best one, but no single change improves it.
    """
    return _searched(collective, algorithm, network, _size_class(nbytes), first)


@lru_cache(maxsize=512)
def _searched(collective: str, algorithm: str, network: NetworkMap, nbytes: int, first: int) -> tuple[int, ...]:
    steps = steps_of(collective, algorithm, network.hosts)
    others = [host for host in range(network.hosts) if host != first]

    def values(orders: Ranks) -> Floats:
        times = times_of(steps, partial(MapTopology, network), orders, nbytes)
        return times.seconds + _BUSY / network.hosts * times.busy_s

    of_ranks = np.array([first, *others])
    if _can_try_all(steps):
        orders = np.array([(first, *order) for order in permutations(others)])  # the order of ranks comes first
    else:
        chance = random.Random(0)
        shuffled = [[first, *chance.sample(others, len(others))] for _ in range(_SHUFFLES)]
        starts = np.array([of_ranks, by_regions(network, first), *shuffled])
        orders = np.stack([of_ranks, improved(starts, values)])
    found = values(orders)
    at = int(np.argmin(found))
    return tuple(orders[at if found[at] < _BETTER * found[0] else 0].tolist())


def _can_try_all(steps: Schedule) -> bool:
    rounds = sum(steps.groups)
    orders = np.prod(np.arange(1.0, steps.size))
    return steps.size <= _ALL_ORDERS and bool(orders * steps.size * rounds <= _MOST_ROUNDS)


def least_s(
    algorithm: Algorithm, params: Mapping[str, Any], network: NetworkMap, nbytes: int, segments: int, root: int
) -> float:
    """Return the simulated seconds of an algorithm if all ways were as good as the best one: no order takes less."""
    best = [min(matrix[i][j] for i, j in network.pairs) for matrix in network]
    hosts = range(network.hosts)
    ideal = NetworkMap(*(tuple(tuple(value * (i != j) for j in hosts) for i in hosts) for value in best))
    return simulated_s(algorithm, params, ideal, hosts, nbytes, segments, root)


def by_regions(network: NetworkMap, first: int = 0) -> tuple[int, ...]:
    """Return all hosts, region by region: from each host to the nearest one left in its region, and then elsewhere."""
    region_of = {host: number for number, region in enumerate(network.regions()) for host in region}
    order, left = [first], set(range(network.hosts)) - {first}
    while left:
        last = order[-1]
        after = min(left, key=lambda host: (region_of[host] != region_of[last], network.delay_s[last][host], host))
        order.append(after)
        left.remove(after)
    return tuple(order)


@lru_cache(maxsize=128)
def steps_of(collective: str, algorithm: str, hosts: int) -> Schedule:
    """Return the schedule of an algorithm with one rank on each host."""
    return schedule(find(collective, algorithm), hosts, 0, {})


def _size_class(nbytes: int) -> int:
    """Return the least power of 4 that is at least `nbytes`, so that few sizes need a search."""
    return 1 << 2 * -(-max(0, nbytes - 1).bit_length() // 2)


def ordered_across(algorithm: Algorithm, phases: Sequence[tuple[str, str]]) -> str:
    """Return the algorithm between hosts whose order is searched: `algorithm`, or a phase of it; empty if none."""
    if isinstance(algorithm, Composition):
        across = dict(phases).get("across", "")
        return across if across in _ORDERED_ACROSS else ""
    return algorithm.name if algorithm.name in ORDERED else ""


def simulated_s(
    algorithm: Algorithm,
    params: Mapping[str, Any],
    network: NetworkMap,
    order: Sequence[int],
    nbytes: int,
    segments: int,
    root: int,
) -> float:
    """Return the simulated seconds of an algorithm with one rank on each host, in this order of hosts."""
    topology, at_positions = MapTopology(network, [order]), {name: params[name] for name in params if name != ORDER}
    position = list(order).index(root)
    parts = min(segments, _MOST_SEGMENTS)
    return simulate(algorithm, nbytes, topology, segments=parts, root=position, params=at_positions).seconds
