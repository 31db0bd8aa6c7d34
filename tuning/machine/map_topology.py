"""The topology of hosts that are far apart, one rank on each, in one order or in many orders at once.

Rank p of the topology is the host at position p of the order. With k orders of h hosts, the topology has k·h ranks:
rank c·h + p is the host at position p of order c. Ranks of different orders pass no messages to each other. So one
simulation of k copies of a schedule compares k orders (`simulator/orders.py`).

A message is under way for the delay from its host to the other one, and no sender waits for its receiver, because
kernels buffer as much as is under way. Each way between two hosts has its measured rate.
The line of a host, which all its ways share, is taken to be as fast as the fastest way of the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unisono.tuning.machine.network_map import OVERHEAD_S, NetworkMap
from unisono.tuning.machine.parameters import UNMEASURED, Link
from unisono.tuning.machine.topology import Floats, Level, Paths, Ranks, Topology


class MapTopology(Topology):
    """The topology of a network map in these orders of hosts, each a permutation of the numbers of all hosts."""

    is_eager = True

    def __init__(self, network: NetworkMap, orders: Sequence[Sequence[int]] | Ranks) -> None:
        self._hosts = network.hosts
        self._order = np.asarray(orders, np.int64).ravel()
        self._delay_s = np.array(network.delay_s)
        per_byte_s = np.array(network.per_byte_s)
        np.fill_diagonal(per_byte_s, np.inf)
        fastest_s = float(per_byte_s.min())
        link = Link("network", 0.0, OVERHEAD_S, fastest_s)
        self.size = size = len(self._order)
        self.levels, self.reduce, self.copy = (Level("network", link, size, "all_to_all"),), UNMEASURED, UNMEASURED
        ports = (fastest_s / per_byte_s.min(axis=axis)[self._order] for axis in (1, 0))  # out of a host, and into it
        self.first_shared = 2 * size
        order = self._order.reshape(-1, self._hosts)
        ways = fastest_s / per_byte_s[order[:, :, None], order[:, None, :]]
        ways[:, range(self._hosts), range(self._hosts)] = 1.0
        self.capacities: Floats = np.concatenate((*ports, ways.ravel()))
        self.names = [(0, "out of host"), (size, "into host"), (self.first_shared, "way")]

    def paths(self, sources: Ranks, targets: Ranks) -> Paths:
        """Return the paths of messages from `sources` to `targets`, equally long arrays."""
        way = self.first_shared + sources * self._hosts + targets % self._hosts
        return Paths(
            np.zeros(len(sources), np.int64),
            self._delay_s[self._order[sources], self._order[targets]],
            np.stack((sources, self.size + targets, way), axis=1),
        )
