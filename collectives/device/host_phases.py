"""The phases of collectives across hosts, as data. Pure arithmetic, equal on all ranks.

The smallest host has p ranks. The ranks with the same index on their hosts, below p, form a *rail*. A collective has up
to three phases: one of the ranks of a host, the same collective among the ranks of each rail, and another one of the
ranks of a host. The table `PHASES` names the first and the last.

The bytes between hosts are the fewest possible. Of an allreduce, a reduce or a broadcast, 1/p travels on each rail. Of
an allgather or a gather, each rank sends its own share to one rank of each other host. In a reduce_scatter, the ranks
of a host first combine their elements for a rail. In an alltoall or a scatter, each rank collects the elements of its
host for its rail, so that each pair of hosts needs p messages and not p * p.

A call is cut into segments. Each vector, or each share, is cut into the same number of parts.

>>> rails = Rails(((0, 1), (2, 3)), rank=3)
>>> [segment.inward for segment in segments_of("allreduce", 9, rails, 8)]
[(8, 4), None]
>>> segment, = segments_of("alltoall", 4, rails, 8)
>>> segment.reads
((0, 1), (2, 1), (1, 1), (3, 1))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

from unisono.algorithms.ir.contracts import CONTRACTS, Cut
from unisono.collectives.device.segments import Run

Hosts: TypeAlias = "Sequence[Sequence[int]]"
Runs: TypeAlias = "tuple[Run, ...]"
# The numbers of elements of INPUT and of OUTPUT.
Elements: TypeAlias = "tuple[int, int]"


class Inside(NamedTuple):
    """A phase inside hosts: the name of a collective, and whether only the host of the root takes part."""

    collective: str
    at_root: bool = False


class Phases(NamedTuple):
    """The phases inside hosts before and after the one between hosts; None for none."""

    inward: Inside | None
    outward: Inside | None


# Between hosts, the ranks of each rail make the collective itself.
PHASES: dict[str, Phases] = {
    "allreduce": Phases(Inside("reduce_scatter"), Inside("allgather")),
    "reduce": Phases(Inside("reduce_scatter"), Inside("gather", at_root=True)),
    "reduce_scatter": Phases(Inside("reduce_scatter"), None),
    "broadcast": Phases(Inside("scatter", at_root=True), Inside("allgather")),
    "scatter": Phases(Inside("scatter", at_root=True), None),
    "allgather": Phases(None, Inside("allgather")),
    "gather": Phases(None, Inside("gather", at_root=True)),
    "alltoall": Phases(Inside("alltoall"), None),
}


def refuses_hosts(hosts: Hosts, collective: str | None = None) -> str | None:
    """Return the reason why ranks on these hosts cannot take the route, as text; None if they can.

    Args:
        hosts: the ranks of each host.
        collective: a collective; None: return the reason for which none can take it.
    """
    sizes = {len(ranks) for ranks in hosts}
    if len(hosts) < 2:
        return "all ranks are on one host"
    if sizes == {1}:
        return "each host has one rank"
    if len(sizes) > 1 and collective is not None and CONTRACTS[collective].input is not Cut.VECTOR:
        return f"the hosts have different numbers of ranks: {', '.join(map(str, map(len, hosts)))}"
    return None


class Rails:
    """The place of this rank among the hosts.

    Attributes:
        rank: this rank.
        hosts: the ranks of each host.
        host, index: the number of the host of this rank, and of this rank on it.
        local: the ranks of its host.
        ways: the number of rails, which is that of the ranks of the smallest host.
        rail: the ranks of its rail, in the order of the hosts; empty if it is in none.
    """

    def __init__(self, hosts: Hosts, rank: int) -> None:
        self.rank, self.hosts = rank, hosts
        self.host, self.index = self.place_of(rank)
        self.local = hosts[self.host]
        self.ways = min(map(len, hosts))
        self.rail = [ranks[self.index] for ranks in hosts] if self.index < self.ways else []

    @property
    def size(self) -> int:
        """The number of all ranks."""
        return sum(map(len, self.hosts))

    def place_of(self, rank: int) -> tuple[int, int]:
        """Return the number of the host of a rank, and of the rank on it."""
        return next((host, ranks.index(rank)) for host, ranks in enumerate(self.hosts) if rank in ranks)


class Between(NamedTuple):
    """A call between hosts, in memory that holds its INPUT and its OUTPUT.

    Attributes:
        source, target: where INPUT and OUTPUT lie. They overlap as the collective allows in place.
        own: the elements of INPUT and of OUTPUT that a rank only keeps; no elements in other collectives. They need
            not pass through the host.
        of_all: whether all ranks make the call, and not those of a rail.
    """

    source: Run
    target: Run
    own: tuple[Run, Run] = ((0, 0), (0, 0))
    of_all: bool = False

    @property
    def elements(self) -> int:
        """The number of elements of the memory."""
        return max(first + count for first, count in (self.source, self.target))


class PhaseSegment(NamedTuple):
    """A part of a call.

    Attributes:
        reads: the elements of INPUT, in the order of the first phase.
        inward: the elements of the phase inside hosts before the one between hosts; None if there is none.
        turned: the elements of the result of `inward`, in the order of the call between hosts; () if it is the same.
        between: the call between hosts.
        outward: the elements of the phase inside hosts behind it; None if there is none.
        writes: the elements of OUTPUT, in the order of the last phase.
    """

    reads: Runs
    inward: Elements | None
    turned: Runs
    between: Between
    outward: Elements | None
    writes: Runs

    @property
    def is_gathered(self) -> bool:
        """Whether the result of `outward` lies elsewhere than in OUTPUT."""
        return self.outward is not None and self.writes[0][1] != self.outward[1]


def segments_of(collective: str, whole: int, rails: Rails, most: int) -> list[PhaseSegment]:
    """Return the segments of a call on a whole vector of `whole` elements, each of about `most` elements."""
    if CONTRACTS[collective].input is Cut.VECTOR:
        return _of_vector(whole, rails, most)
    share, step = whole // rails.size, max(1, most // rails.size)
    return [_of_shares(collective, share, (at, min(step, share - at)), rails) for at in range(0, share, step)]


def _of_vector(whole: int, rails: Rails, most: int) -> list[PhaseSegment]:
    """Cut a vector. The elements at its end that the rails cannot divide are a segment of all ranks.

    A host with more ranks than there are rails repeats the first part for each further rank, whose result is not used.
    """
    ways, ranks = rails.ways, len(rails.local)
    step, divided = max(ways, most // ways * ways), whole // ways * ways
    segments = []
    for first in range(0, divided, step):
        length = min(step, divided - first)
        part = length // ways
        reads = ((first, length), *[(first, part)] * (ranks - ways))
        between = Between((0, part), (0, part))
        segments.append(
            PhaseSegment(reads, (ranks * part, part), (), between, (part, ranks * part), ((first, length),))
        )
    if divided < whole:
        run, part = ((divided, whole - divided),), whole - divided
        segments.append(PhaseSegment(run, None, (), Between((0, part), (0, part), of_all=True), None, run))
    return segments


def _of_shares(collective: str, share: int, part: Run, rails: Rails) -> PhaseSegment:
    """Return the segment of one part of all shares, which have `share` elements each."""
    contract, (first, count) = CONTRACTS[collective], part
    hosts, ranks = len(rails.hosts), len(rails.local)

    def of(members: Iterable[int]) -> Runs:
        return tuple((rank * share + first, count) for rank in members)

    by_rail, of_host = of(chain.from_iterable(zip(*rails.hosts, strict=True))), hosts * count
    whole = ranks * of_host
    if contract.input is Cut.SHARE:
        start = rails.host * count
        between = Between((start, count), (0, of_host), ((0, 0), (start, count)))
        return PhaseSegment((part,), None, (), between, (of_host, whole), by_rail)
    if contract.output is Cut.SHARE:
        start = rails.host * count
        own = ((0, 0), (0, 0)) if contract.reduces else ((start, count), (0, 0))
        return PhaseSegment(by_rail, (whole, of_host), (), Between((0, of_host), (start, count), own), None, (part,))
    turned = tuple(((rank * hosts + host) * count, count) for host in range(hosts) for rank in range(ranks))
    start = rails.host * ranks * count
    between = Between((0, whole), (whole, whole), ((start, ranks * count), (whole + start, ranks * count)))
    return PhaseSegment(by_rail, (whole, whole), turned, between, None, of(chain.from_iterable(rails.hosts)))


def without(run: Run, kept: Run) -> Runs:
    """Return the runs of some elements that remain when others among them are removed.

    >>> without((0, 9), (3, 2)), without((0, 9), (0, 0))
    (((0, 3), (5, 4)), ((0, 9),))
    """
    (first, count), (start, length) = run, kept
    if not length:
        return (run,)
    before, behind = (first, start - first), (start + length, first + count - start - length)
    return tuple(each for each in (before, behind) if each[1])
