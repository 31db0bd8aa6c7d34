"""Simulates one schedule in many orders at once, as one copy of it for each order.

All copies are one schedule of one topology, whose rounds are arrays over all ranks. So a thousand orders of 8 hosts
take about as long as 25 simulations of one order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from unisono.tuning.machine.topology import Floats, Ranks, Topology
from unisono.tuning.simulator import round_model
from unisono.tuning.simulator.step_table import Schedule

# The ranks of all copies that are simulated at once; more would leave the caches.
_MOST_RANKS = 1 << 15
_COPIED = ("kind", "lane", "first", "stride", "times", "advance", "share")


class OrderTimes(NamedTuple):
    """The simulated times of some orders.

    Attributes:
        seconds: for each order, the time until the last rank has ended.
        busy_s: for each order, the time for which all shared resources together are busy. Of two orders that take
            equally long, the one that occupies them for less time is better.
    """

    seconds: Floats
    busy_s: Floats


def times_of(
    steps: Schedule, over: Callable[[Ranks], Topology], orders: Ranks, nbytes: float, segments: int = 1
) -> OrderTimes:
    """Return the times of a schedule on vectors of `nbytes`, for each row of `orders`.

    `over` returns the topology of some orders at once, where rank c·n + r is rank r of the c-th order of n ranks.

    Raises:
        RecursionError: the schedule has no rounds, because its lanes wait for each other in both directions.
    """
    at_once = max(1, _MOST_RANKS // steps.size)
    parts = [
        _times(steps, over, orders[first : first + at_once], nbytes, segments)
        for first in range(0, len(orders), at_once)
    ]
    return OrderTimes(*map(np.concatenate, zip(*parts, strict=True)))


def _times(
    steps: Schedule, over: Callable[[Ranks], Topology], orders: Ranks, nbytes: float, segments: int
) -> OrderTimes:
    copies, size, topology = len(orders), steps.size, over(orders)
    traffic = round_model.run(_side_by_side(steps, copies), topology, nbytes, segments)
    shared_s = traffic.busy_s[topology.first_shared :].reshape(copies, -1)
    return OrderTimes(traffic.finish_s.reshape(copies, size).max(axis=1), shared_s.sum(axis=1))


def _side_by_side(steps: Schedule, copies: int) -> Schedule:
    """Return `copies` copies of a schedule as one, with the ranks of each after those of the copy before."""
    first = np.repeat(np.arange(copies) * steps.size, len(steps.rank))
    columns: dict[str, Any] = {name: np.tile(getattr(steps, name), copies) for name in _COPIED}
    peer = np.tile(steps.peer, copies)
    return steps._replace(
        size=copies * steps.size,
        copies=copies,
        rank=np.tile(steps.rank, copies) + first,
        peer=np.where(peer < 0, peer, peer + first),
        **columns,
    )
