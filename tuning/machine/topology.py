"""Topologies: which link joins two ranks, and which parts of the network their messages share with others.

A topology is a list of *levels* from the inside out: ranks are joined to hosts, hosts to racks, and so on. A level
joins `size` *parts* (ranks, or parts of the next level inside) by connections. A *connection* carries messages in one
direction. The field `pairs` of the level's link says how many messages a connection carries at full bandwidth at once.
There are three kinds of levels:

- "switch": each part has one connection up to the switch and one down from it. Switches above switches form a fat tree.
  A host of 8 ranks whose connection to the switch has `pairs` = 2 is oversubscribed fourfold.
- "all_to_all": each part has a connection to every other part. An NVLink island is one such level. A dragonfly with
  minimal routing has three levels: "switch" for the ranks of a router, "all_to_all" for the routers of a dragonfly
  group, and "all_to_all" for these groups.
- "torus": parts stand on a grid of `shape` that wraps around. A message goes along one dimension after the other, each
  time in the direction with fewer hops. Each hop after the first adds `hop_s`.

A part may have several *NICs*: connections up and down of its own for each of them. Its ranks use them in blocks, so of
8 ranks and 4 NICs, ranks 0 and 1 use NIC 0. In a fabric with *rails*, NIC k of every part is connected to switch k of
the level, as in clusters of GPUs. A message between ranks of different rails takes the level above, where the switches
of the level are the parts.

Two ranks talk over the innermost level that joins them. Each connection that a message crosses is a *resource*. It has
a number and a capacity: how many messages it carries at full bandwidth at once. Some connections may be declared slower
than others. The sender and the receiver of a message are resources too, with the `ports` of their link as capacity.

All methods take arrays of pairs of ranks, because a simulation asks about many messages at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from unisono.algorithms.composition.host_levels import Hosts, ranks_of
from unisono.errors import UsageError
from unisono.tuning.machine.parameters import MOST, UNMEASURED, Curve, Link

Ranks: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

JOINS = ("switch", "all_to_all", "torus")
NO_RESOURCE = -1
# For one level, so that a mistyped size is refused and does not fill the memory: a torus of 110 × 110 × 110 fits.
MOST_CONNECTIONS = 1 << 23


class Level(NamedTuple):
    """One level: how its parts are joined.

    Attributes:
        name: such as "host".
        link: the link between ranks that this level joins.
        size: number of parts; 0 at the outermost level means as many as the ranks need.
        join: one of `JOINS`.
        shape: the lengths of a torus; their product is `size`.
        hop_s: seconds of each hop of a torus after the first.
        slow: the parts, numbered over the whole level, whose connections have less capacity, each with the fraction of
            the full capacity that its connections have.
        nics: number of NICs of each part. Each has the `pairs` of the link as its capacity.
        rails: whether the level has a switch for each NIC of a part, and not one for all. Such a level joins only ranks
            of one rail, and the next level joins its switches.
    """

    name: str
    link: Link
    size: int = 0
    join: str = "switch"
    shape: tuple[int, ...] = ()
    hop_s: float = 0.0
    slow: tuple[tuple[int, float], ...] = ()
    nics: int = 1
    rails: bool = False


class Paths(NamedTuple):
    """The paths of many messages.

    Attributes:
        level: for each message, the number of the level that joins its sender and its receiver.
        extra_s: for each message, the seconds that its hops add to the latency of that level's link.
        resources: for each message (row), the numbers of its resources, padded with `NO_RESOURCE`.
    """

    level: Ranks
    extra_s: Floats
    resources: Ranks


class Topology:
    """The levels of a number of ranks, with all their resources.

    Attributes:
        size: number of ranks.
        levels: from the inside out.
        capacities: for each resource, by its number, how many messages it carries at full bandwidth.
        names: the kinds of resources, as (first number, name); ascending.
        first_shared: the number of the first resource behind the ports of ranks. Ranks share it and all further ones.
        reduce, copy: seconds of combining and of copying, by bytes. Without knots, combining takes the rate of the
            innermost link, and copying takes no time.
        is_eager: whether a message is under way before its receiver waits for it, as on links to far hosts, because
            kernels buffer as much as is under way. If not, it is a rendezvous.
    """

    is_eager = False

    def __init__(
        self,
        size: int,
        levels: Sequence[Level],
        *,
        reduce: Curve = UNMEASURED,
        copy: Curve = UNMEASURED,
        is_eager: bool = False,
    ) -> None:
        self.size, self.levels, self.reduce, self.copy, self.is_eager = size, tuple(levels), reduce, copy, is_eager
        most = prod(level.size for level in levels) if levels[-1].size else size
        if size > most:
            raise UsageError(f"the topology has {most} ranks, not {size}")
        self._setup(*_places(size, self.levels))

    @classmethod
    def of_hosts(
        cls, hosts: Hosts, inside: Link, across: Link, *, reduce: Curve = UNMEASURED, copy: Curve = UNMEASURED
    ) -> Topology:
        """Return the topology of hosts with any numbers of ranks: two levels of switches.

        Raises:
            UsageError: `hosts` does not name every rank exactly once.
        """
        from unisono.algorithms.composition.host_levels import levels_of

        of_hosts = [ranks_of(host) for host in hosts]
        size = sum(map(len, of_hosts))
        levels_of(tuple(of_hosts), size)
        topology = cls.__new__(cls)
        topology.size, topology.reduce, topology.copy = size, reduce, copy
        topology.levels = (Level("host", inside, max(map(len, of_hosts))), Level("network", across, len(of_hosts)))
        host_of = np.empty(size, np.int64)
        for number, ranks in enumerate(of_hosts):
            host_of[list(ranks)] = number
        topology._setup([np.arange(size), host_of], [np.arange(size), host_of])
        return topology

    def paths(self, sources: Ranks, targets: Ranks) -> Paths:
        """Return the paths of messages from `sources` to `targets`, equally long arrays. No rank may send to itself."""
        level = np.zeros(len(sources), np.int64)
        for at, part in enumerate(self._parts[1:]):
            level += (level == at) & (part[sources] != part[targets])
        extra_s = np.zeros(len(sources))
        columns: list[Ranks] = []
        for at, join in enumerate(level_.join for level_ in self.levels):
            crosses = level >= at if at == 0 or join == "switch" else level == at
            ends = self._ways[at][sources], self._ways[at][targets]
            if at == 0 or join == "switch":
                columns += [np.where(crosses, self._up[at] + ends[0], NO_RESOURCE)]
                columns += [np.where(crosses, self._down[at] + ends[1], NO_RESOURCE)]
            if join == "all_to_all":
                channel = self._between[at] + ends[0] * self._widths[at] + ends[1] % self._widths[at]
                columns.append(np.where(level == at, channel, NO_RESOURCE))
            elif join == "torus":
                hops, on_the_way = self._through_torus(at, *ends)
                extra_s += np.where(level == at, (hops - 1) * self.levels[at].hop_s, 0.0)
                columns += [np.where(level == at, column, NO_RESOURCE) for column in on_the_way]
        return Paths(level, extra_s, np.stack(columns, axis=1))

    def hosts(self) -> Hosts:
        """Return the ranks of each host (the ranks that the innermost level joins), in the form of `Hosts`."""
        if len(self.levels) == 1:
            return (tuple(range(self.size)),)
        of_rank = self._parts[1]
        order = np.argsort(of_rank, kind="stable")
        edges = np.flatnonzero(np.diff(of_rank[order])) + 1
        return tuple(tuple(ranks.tolist()) for ranks in np.split(order, edges))

    def name_of(self, resource: int) -> str:
        """Return the name of a resource for reports."""
        first, name = max(entry for entry in self.names if entry[0] <= resource)
        return f"{name} {resource - first}"

    def _setup(self, parts: list[Ranks], ways: list[Ranks]) -> None:
        """Number the resources and set their capacities; the arguments are those that `_places` returns."""
        self._parts, self._ways, self.first_shared = parts, ways, 2 * self.size
        self._up, self._down, self._between, self._widths = ([0] * len(self.levels) for _ in range(4))
        self.names: list[tuple[int, str]] = []
        capacities: list[Floats] = []
        for at, level in enumerate(self.levels):
            number = int(parts[at].max()) + 1
            self._widths[at] = min(level.size or number, number)
            slow = np.ones(number)
            for part, factor in level.slow:
                if part < number:
                    slow[part] = factor
            if at == 0 or level.join == "switch":
                inside = "rank" if at == 0 else self.levels[at - 1].name
                inside += " NIC" if level.nics > 1 else ""
                capacity = float(level.link.ports) if at == 0 else level.link.pairs
                of_ways = np.repeat(slow * capacity, level.nics)
                self._up[at] = self._add(capacities, f"out of {inside}", of_ways)
                self._down[at] = self._add(capacities, f"into {inside}", of_ways)
            if level.join == "all_to_all":
                _check_connections(level, number * self._widths[at])
                capacity_of_way = np.repeat(slow * level.link.pairs, self._widths[at])
                self._between[at] = self._add(capacities, f"{level.name} channel", capacity_of_way)
            elif level.join == "torus":
                idle = -number % level.size  # a message may pass through parts of the grid that have no rank
                _check_connections(level, (number + idle) * 2 * len(level.shape))
                whole = np.pad(slow, (0, idle), constant_values=1.0)
                capacity_of_way = np.repeat(whole * level.link.pairs, 2 * len(level.shape))
                self._between[at] = self._add(capacities, f"{level.name} link", capacity_of_way)
        self.capacities = np.concatenate(capacities)

    def _add(self, capacities: list[Floats], name: str, more: Floats) -> int:
        first = sum(map(len, capacities))
        capacities.append(more)
        self.names.append((first, name))
        return first

    def _through_torus(self, at: int, here: Ranks, there: Ranks) -> tuple[Ranks, list[Ranks]]:
        """Return the hops from each rank in `here` to that in `there`, and the resources on the way as columns."""
        shape = self.levels[at].shape
        width = prod(shape)
        grid, position, goal = here - here % width, here % width, there % width
        hops = np.zeros(len(here), np.int64)
        columns = []
        stride = 1
        for dimension, length in enumerate(shape):
            place, end = position // stride % length, goal // stride % length
            ahead = (end - place) % length
            backwards = ahead * 2 > length
            distance = np.where(backwards, length - ahead, ahead)
            step = np.where(backwards, -1, 1)
            for hop in range(int(distance.max(initial=0))):
                at_hop = grid + position + ((place + hop * step) % length - place) * stride
                link = self._between[at] + at_hop * 2 * len(shape) + 2 * dimension + backwards
                columns.append(np.where(hop < distance, link, NO_RESOURCE))
            hops += distance
            position = position + (end - place) * stride
            stride *= length
        return hops, columns


def _places(size: int, levels: Sequence[Level]) -> tuple[list[Ranks], list[Ranks]]:
    """Return, for each level, the part of every rank, and the connection by which the rank leaves that part.

    The connection is the part itself, or the NIC of the rank, numbered over all parts. Above a level with rails, the
    part is a switch of that level: a group of parts has as many switches as NICs.
    """
    numbers, zeros = np.arange(size), np.zeros(size, np.int64)
    parts, ways = list[Ranks](), list[Ranks]()
    ranks, rail, rails = 1, zeros, 1
    for level in levels:  # a number of ranks may have more than 64 bits
        part = numbers // min(ranks, size) * rails + rail
        nic = numbers % min(ranks, MOST) * level.nics // min(ranks, MOST) if level.nics > 1 else zeros
        parts.append(part)
        ways.append(part * level.nics + nic)
        rail, rails = (nic, level.nics) if level.rails else (zeros, 1)
        ranks *= level.size
    return parts, ways


def _check_connections(level: Level, count: int) -> None:
    if count > MOST_CONNECTIONS:
        raise UsageError(
            f"the level {level.name!r} has {count} connections, and a topology may have {MOST_CONNECTIONS} a level"
        )


def flat(size: int, link: Link, **rates: Any) -> Topology:
    """Return the topology of ranks that share only their own ports."""
    return Topology(size, [Level("network", link)], **rates)
