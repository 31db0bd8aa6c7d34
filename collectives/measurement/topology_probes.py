"""Measures the levels of the network of a job: which hosts are near each other, and the link of each level.

Theory of operation. The first ranks of all pairs of hosts exchange a short and a long message, in turns in which each
host is in one pair. From these distances, all ranks compute the same groups of hosts (`tuning.measure.host_groups`).
They visit the pairs again until two halves of the visits show the same groups, or give up and say so. Each level then
has its link calibrated, as `link_probes` does: between two ranks of a host; between the ranks of two hosts of a group,
for the level above the hosts; and between the first ranks of the hosts of two groups, for the levels above these. All
pairs of ranks exchange messages at once, which shows how many the way out of a host or group carries.

Used by: ``unisono calibrate topology``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unisono.algorithms.composition.host_levels import ranks_of
from unisono.collectives.communicator import Communicator
from unisono.collectives.measurement.link_probes import PairProbes, link_calibrated
from unisono.errors import UsageError
from unisono.tuning.machine.parameters import NETWORK, PRIORS, Parameters
from unisono.tuning.machine.topology import Level
from unisono.tuning.machine.topology_files import Description
from unisono.tuning.measure.host_groups import (
    Groups,
    levels_of_visits,
    pairs_between_parts,
    sizes_and_places,
    turns,
)

# More hosts take minutes, and show no more levels.
_MOST_HOSTS = 256
_SHORT_NBYTES, _LONG_NBYTES = 8, 1 << 20
_DTYPE = "float32"
# The time for each message size of a pair of hosts at a visit. All pairs are visited several times, so that other work
# on the hosts does not disturb all visits of a pair: so often at first, and at most.
_DISTANCE_S, _VISITS, _MOST_VISITS = 0.03, 4, 24

Ranks = Sequence[Sequence[int]]


class _LevelProbe(NamedTuple):
    """A level to measure: its name, the kind of its link, the ranks in pairs, and how many parts it joins."""

    name: str
    link: str
    ranks: list[int]
    size: int


class MeasuredTopology(NamedTuple):
    """The levels of a job, and the reason why its hosts are in no groups; "" if the groups are sure."""

    description: Description
    doubt: str


def topology_measured(comm: Communicator, name: str, *, short: bool) -> MeasuredTopology:
    """Return the levels of the job, which has a `name`. All ranks of `comm` call this; the results are equal.

    Raises:
        UsageError: there is only one rank, or there are too many hosts.
    """
    if comm.size < 2:
        raise UsageError("a topology is measured between ranks: start at least two, as `unisono run -n 2` does")
    question = comm.explain("allreduce", _SHORT_NBYTES).question
    hosts = [ranks_of(host) for host in question.hosts] or [tuple(range(comm.size))]
    if len(hosts) > _MOST_HOSTS:
        raise UsageError(f"the job has {len(hosts)} hosts: measure at most {_MOST_HOSTS}, which show all levels")
    groups, doubt = _levels_of_hosts(comm, hosts) if len(hosts) > 1 else ((), "")
    sizes, places = sizes_and_places(groups) if groups else ((), ())
    largest = max(hosts, key=len)
    inside = question.inside if groups else question.link
    probes = [_LevelProbe("host", inside, [*largest[:2]], len(largest)), *_between(groups, sizes, hosts, question.link)]
    parameters = PRIORS
    for probe in probes:
        parameters = _measured(comm, parameters, probe, short=short)
    levels = [_level(probe, parameters, is_outermost=probe is probes[-1]) for probe in probes]
    is_far = any(level.link.is_far for level in levels)
    reduce, copy = parameters.reduce[_DTYPE], parameters.copy
    return MeasuredTopology(Description(name, tuple(levels), reduce, copy, is_far, places), doubt)


def _levels_of_hosts(comm: Communicator, hosts: Ranks) -> tuple[tuple[Groups, ...], str]:
    """Return the groups of hosts of each level, and "" or the reason why there is only one level."""
    visits = _distances(comm, hosts)
    while (levels := levels_of_visits(visits[:, 0].tolist(), visits[:, 1].tolist())) is None:
        if len(visits) >= _MOST_VISITS:
            latencies_us = visits[:, 0].min(axis=0)[np.triu_indices(len(hosts), 1)] * 1e6
            doubt = (
                f"the hosts are in no groups, because two halves of {len(visits)} measurements of their distances show "
                f"different ones (least latencies: {latencies_us.min():.0f} to {latencies_us.max():.0f} µs): measure "
                "again while the hosts do no other work"
            )
            return (((*range(len(hosts)),),),), doubt
        visits = np.concatenate([visits, _distances(comm, hosts)])
    return levels, ""


def _distances(comm: Communicator, hosts: Ranks) -> npt.NDArray[np.float64]:
    """Return the seconds of a short message, and of each further byte of a long one, between each two hosts.

    They have the shape (visits, 2, hosts, hosts), and are the same on all ranks.
    """
    times = np.zeros((_VISITS, 2, len(hosts), len(hosts)))
    for visit, pairs in product(range(_VISITS), turns(len(hosts))):
        for pair in pairs:
            ranks = [hosts[host][0] for host in pair]
            if comm.rank in ranks:
                with comm.subgroup(ranks) as both:
                    times[visit, :, pair[0], pair[1]] = _distance(both)
        comm.barrier()
    result: npt.NDArray[np.float64] = comm.allreduce(np.maximum(times, times.transpose(0, 1, 3, 2)), "max")
    return result


def _distance(both: Communicator) -> npt.NDArray[np.float64]:
    """Return the seconds of a short message, and of each further byte of a long one, on rank 0 of two; else zeros."""
    probes = PairProbes(both, both, _DISTANCE_S)
    short_s, long_s = (probes.least_one_way(nbytes) for nbytes in (_SHORT_NBYTES, _LONG_NBYTES))
    per_byte_s = max(long_s - short_s, 1e-3 * long_s) / (_LONG_NBYTES - _SHORT_NBYTES)
    return np.array([short_s, per_byte_s]) if both.rank == 0 else np.zeros(2)


def _between(levels: Sequence[Groups], sizes: Sequence[int], hosts: Ranks, link: str) -> list[_LevelProbe]:
    """Return the levels above the hosts, with the pairs of ranks that measure each."""
    names = [f"group {number}" if len(levels) > 2 else "group" for number in range(1, len(levels))] + [NETWORK]
    inside: Groups = tuple((host,) for host in range(len(hosts)))
    probes = list[_LevelProbe]()
    for name, groups, size in zip(names, levels, sizes, strict=False):
        pairs = [(hosts[one][0], hosts[other][0]) for one, other in pairs_between_parts(groups, inside)]
        if not probes:
            one, other = pairs_between_parts(groups, inside)[0]
            pairs = list(zip(hosts[one], hosts[other], strict=False))
        probes.append(_LevelProbe(name, link, [rank for pair in pairs for rank in pair], size))
        inside = groups
    return probes


def _measured(comm: Communicator, parameters: Parameters, probe: _LevelProbe, *, short: bool) -> Parameters:
    """Return `parameters` with the link of a level; unchanged if no two ranks use it."""
    if len(probe.ranks) < 2:
        return parameters
    if comm.rank in probe.ranks:
        with comm.subgroup(probe.ranks) as pairs:
            parameters = link_calibrated(pairs, parameters, probe.link, probe.name, short=short)
    result: Parameters = comm.broadcast_object(parameters, root=probe.ranks[0])
    return result


def _level(probe: _LevelProbe, parameters: Parameters, *, is_outermost: bool) -> Level:
    """Return a measured level. The outermost level joins as many parts as a simulation needs."""
    link = parameters.link(probe.link, probe.name)._replace(name=probe.name)
    return Level(probe.name, link, 0 if is_outermost else probe.size)
