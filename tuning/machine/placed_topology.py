"""A topology whose ranks stand at chosen places, in one order of places or in many at once.

The places are the ranks of another topology, which describes the whole machine. With k orders of n places, there are
k·n ranks: rank c·n + r stands at the r-th place of order c. Each order has all resources of the machine for itself. So
one simulation of k copies of a schedule compares k orders (`simulator/orders.py`).
"""

from __future__ import annotations

import numpy as np

from unisono.tuning.machine.topology import NO_RESOURCE, Floats, Paths, Ranks, Topology


class PlacedTopology(Topology):
    """The topology of ranks at places of `machine`. Each row of `orders` has the place of every rank."""

    def __init__(self, machine: Topology, orders: Ranks) -> None:
        self._machine, self._place = machine, orders.ravel()
        copies, self._ranks = orders.shape
        self.size, self.levels = copies * self._ranks, machine.levels
        self.reduce, self.copy, self.names = machine.reduce, machine.copy, machine.names
        self.is_eager, self._parts = machine.is_eager, [part[self._place] for part in machine._parts]
        self._ports, self._shared = np.split(np.arange(len(machine.capacities)), [machine.first_shared])
        self.first_shared = copies * len(self._ports)
        self.capacities: Floats = np.concatenate(
            (np.tile(machine.capacities[self._ports], copies), np.tile(machine.capacities[self._shared], copies))
        )

    def paths(self, sources: Ranks, targets: Ranks) -> Paths:
        """Return the paths of messages from `sources` to `targets`, equally long arrays, of ranks of one order each."""
        paths = self._machine.paths(self._place[sources], self._place[targets])
        copy, number = (sources // self._ranks)[:, None], paths.resources
        port = copy * len(self._ports) + number
        shared = self.first_shared + copy * len(self._shared) + number - len(self._ports)
        own = np.where(number < len(self._ports), port, shared)
        return paths._replace(resources=np.where(number == NO_RESOURCE, NO_RESOURCE, own))
