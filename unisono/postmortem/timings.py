"""How long the calls of a job took, from the dumps of its ranks, by kind of call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from unisono.algorithms.composition.host_levels import Hosts
from unisono.algorithms.ir.contracts import CONTRACTS, VECTOR_CALLS
from unisono.dtypes import DTYPES
from unisono.postmortem.culprits import CallOfRanks, rows_of
from unisono.postmortem.loading import JobDumps
from unisono.transports.recorder.memory import RecordedCall

# Calls whose text has one of these must combine contributions in a certain order.
_ORDERED = ("reproducible", "accumulate=")


class CallKind(NamedTuple):
    """The calls of a job that the tuner treats alike, and that one algorithm has run.

    Attributes:
        collective: the method, such as "allreduce" or "allgatherv".
        nbytes: bytes of the vector.
        hosts: the ranks of each host, numbered as in the communicator.
        link: the transport of the slowest links between them.
        dtype: the class of dtypes, "plain" or "narrow".
        algorithm: the algorithm that ran.
        is_ordered: whether the calls demand an order of combining, so that only few algorithms can run them.
    """

    collective: str
    nbytes: int
    hosts: Hosts
    link: str
    dtype: str
    algorithm: str
    is_ordered: bool

    @property
    def name(self) -> str:
        """The collective in the registry."""
        return VECTOR_CALLS.get(self.collective, self.collective)


class KindTimes(NamedTuple):
    """The calls of one kind: their number, and the median of their seconds."""

    kind: CallKind
    calls: int
    median_s: float


def times_of(dumps: JobDumps) -> list[KindTimes]:
    """Return the times of collectives among several ranks that all have ended, those with the most time in all first.

    The time of a call is from the moment when the last rank of a host has begun it until the last one has ended it, on
    the slowest host. So it has no waiting for late ranks.
    """
    by_kind = defaultdict[CallKind, list[float]](list)
    for row in rows_of(dumps):
        calls = [call for call in row.by_rank.values() if call is not None]
        if 1 < len(calls) == len(row.by_rank) and all(_is_known(call) for call in calls):
            by_kind[_kind(dumps, row, calls)].append(_seconds(dumps, row))
    kinds = [KindTimes(kind, len(times), median(times)) for kind, times in by_kind.items()]
    return sorted(kinds, key=lambda each: -each.calls * each.median_s)


def _is_known(call: RecordedCall) -> bool:
    collective = str(call.facts.get("collective"))
    return (
        call.state == "done"
        and "on a device" not in call.text
        and (collective in CONTRACTS or collective in VECTOR_CALLS)
    )


def _kind(dumps: JobDumps, row: CallOfRanks, calls: Sequence[RecordedCall]) -> CallKind:
    facts = calls[0].facts
    dtype = DTYPES.get(str(facts.get("dtype")))
    return CallKind(
        str(facts["collective"]),
        max(1, *(call.nbytes for call in calls)),
        _hosts(dumps, list(row.by_rank)),
        _link(dumps, list(row.by_rank)),
        "narrow" if dtype is not None and facts.get("op") and dtype.accumulate != dtype.name else "plain",
        str(facts.get("algorithm")),
        any(word in row.text for word in _ORDERED),
    )


def _seconds(dumps: JobDumps, row: CallOfRanks) -> float:
    by_host = defaultdict[str, list[RecordedCall]](list)
    for rank, call in row.by_rank.items():
        if call is not None:
            by_host[_host(dumps, rank)].append(call)
    return (
        max(max(call.ended_ns for call in calls) - max(call.begun_ns for call in calls) for calls in by_host.values())
        / 1e9
    )


def _host(dumps: JobDumps, rank: int) -> str:
    return str(dumps.by_rank[rank].snapshot.about.get("host", "")) if rank in dumps.by_rank else ""


def _hosts(dumps: JobDumps, ranks: Sequence[int]) -> Hosts:
    by_host: Mapping[str, list[int]] = defaultdict(list)
    for index, rank in enumerate(ranks):
        by_host[_host(dumps, rank)].append(index)
    return tuple(tuple(of_host) for of_host in by_host.values())


def _link(dumps: JobDumps, ranks: Sequence[int]) -> str:
    """Return the transport of the channels between ranks: one that is no shared memory, if there is one."""
    used = {
        channel.transport
        for rank in ranks
        if rank in dumps.by_rank
        for channel in dumps.by_rank[rank].snapshot.traffic
        if channel.peer in ranks
    }
    return next(iter(sorted(used - {"shm"})), "shm")


def total_s(times: Iterable[KindTimes]) -> float:
    """Return the seconds of all calls together."""
    return sum(each.calls * each.median_s for each in times)
