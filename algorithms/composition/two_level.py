"""Two-level algorithms: all-to-all and scans of ranks on hosts, where each pair of hosts exchanges few long messages.

Alltoall: the ranks of a host first hand each other all blocks for the ranks of one place, on whatever host. Then the
ranks of one place exchange with those of the same place on other hosts what all ranks of a host have for another host,
in one message: there are as many messages between hosts as pairs of ranks of one place, instead of all pairs.

Scans: each host scans by itself; the last ranks of hosts, which have what all their host contributes, do an exclusive
scan, and broadcast what all hosts before contribute to their own. Reference: Sanders, Träff 2006; Träff, Rougier 2014.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from math import lcm
from typing import NamedTuple

from unisono.algorithms.builders.arguments import check_ranks, check_supported
from unisono.algorithms.composition.embedding import Stage, Window, run_of_blocks
from unisono.algorithms.composition.host_levels import Hosts, levels_of, needs_equal, runs_of_ranks
from unisono.algorithms.composition.phase_groups import Part, PhaseGroup, composed, method
from unisono.algorithms.ir.plan import Buffer, Copy, Group, Plan, Reduce, even


class _Place(NamedTuple):
    """A rank on its host, of several hosts that are runs of ranks."""

    runs: tuple[tuple[int, ...], ...]
    host: int
    rank: int

    @property
    def own(self) -> tuple[int, ...]:
        """Return the ranks of its host."""
        return self.runs[self.host]

    @property
    def sizes(self) -> frozenset[int]:
        """Return how many ranks hosts have."""
        return frozenset(map(len, self.runs))


def _place(size: int, rank: int, hosts: Hosts | None) -> _Place:
    runs = runs_of_ranks(hosts, size)
    return _Place(runs, bisect_right(runs, rank, key=lambda run: run[0]) - 1, rank)


def alltoall_two_level(
    size: int,
    rank: int,
    root: int = 0,
    *,
    hosts: Hosts | None = None,
    inside: str = "direct",
    across: str = "pairwise",
) -> Plan:
    """Return the plan of an alltoall `inside` hosts of equally many consecutive ranks, and then `across` them.

    INPUT, OUTPUT and SCRATCH are `size` equal blocks each. INPUT and OUTPUT must not be the same memory.

    Raises:
        UsageError: hosts are not equal or not consecutive, or an algorithm cannot be a phase.
        NoAlgorithmError: there is no such algorithm, or it does not support so many ranks.
    """
    check_ranks(size, rank, root)
    place = _place(size, rank, hosts)
    check_supported(needs_equal(levels_of(place.runs, size)))
    own, number = place.own, len(place.runs)
    lane = tuple(run[own.index(rank)] for run in place.runs)
    inner = PhaseGroup(method("alltoall", inside, place.sizes), own, rank)
    outer = PhaseGroup(method("alltoall", across, frozenset((number,))), lane, rank)
    # In SCRATCH, block h·q + i is what comes from place i and goes on to host h, where hosts have q ranks.
    given, sorted_ = (Window(buffer, 0, number, 1, len(own)) for buffer in (Buffer.INPUT, Buffer.SCRATCH))
    held = Buffer.INPUT if inner.is_idle else Buffer.SCRATCH
    stages = (
        inner.idle() if inner.is_idle else inner.between(given, sorted_),
        outer.between(run_of_blocks(held, 0, len(own)), run_of_blocks(Buffer.OUTPUT, 0, len(own))),
    )
    return composed(
        ("alltoall", "two_level"),
        size,
        rank,
        root,
        stages,
        input=even(size),
        output=even(size),
        kept=int(held is Buffer.SCRATCH),
    )


def scan_two_level(
    size: int,
    rank: int,
    root: int = 0,
    *,
    hosts: Hosts | None = None,
    inside: str = "recursive_doubling",
    across: str = "recursive_doubling",
    broadcast: str = "binomial",
) -> Plan:
    """Return the plan of an inclusive scan `inside` hosts of consecutive ranks, and then `across` them.

    INPUT and OUTPUT are cut alike, in as many blocks as the broadcast needs, and may be the same memory. SCRATCH is one
    copy for what the hosts before contribute, and that of the phase with most of it. Contributions are combined in
    ascending order. Hosts may have different numbers of ranks.

    Raises:
        UsageError: hosts are not consecutive, or an algorithm cannot be a phase.
        NoAlgorithmError: as the alltoall.
    """
    check_ranks(size, rank, root)
    scan = _scan("scan", _place(size, rank, hosts), inside, across, broadcast)
    whole, team = Part(0, scan.blocks), scan.inside
    prefix = whole if team.is_idle else whole.within(Buffer.OUTPUT)
    carried = scan.copy(0)
    stages = (
        team.idle() if team.is_idle else team.stage(whole, prefix),
        *scan.carry(prefix, carried),
        _finish((carried, prefix) if scan.place.host else (prefix,)),
    )
    return _plan(("scan", "two_level"), scan, root, stages, kept=min(scan.place.host, 1))


def exscan_two_level(
    size: int,
    rank: int,
    root: int = 0,
    *,
    hosts: Hosts | None = None,
    inside: str = "recursive_doubling",
    across: str = "recursive_doubling",
    broadcast: str = "binomial",
) -> Plan:
    """Return the plan of an exclusive scan `inside` hosts of consecutive ranks, and then `across` them.

    OUTPUT of rank 0 is not written. SCRATCH has one more copy than that of the inclusive scan, otherwise as that.
    """
    check_ranks(size, rank, root)
    scan = _scan("exscan", _place(size, rank, hosts), inside, across, broadcast)
    whole, team, is_first = Part(0, scan.blocks), scan.inside, scan.place.own[0] == rank
    prefix, carried = scan.copy(0), scan.copy(1)
    # The last rank of a host goes on with all that the host contributes, if there are hosts after it.
    adds = rank == scan.place.own[-1] and not is_first and rank < size - 1
    total = whole.within(Buffer.OUTPUT) if adds else whole
    known = ((carried,) if scan.place.host else ()) + (() if is_first else (prefix,))
    stages = (
        team.idle() if team.is_idle else team.stage(whole, prefix),
        Stage(1, Group((Reduce(total.span(), (prefix.span(), whole.span())),)) if adds else None),
        *scan.carry(total, carried),
        _finish(known),
    )
    return _plan(("exscan", "two_level"), scan, root, stages, kept=2)


class _Scan(NamedTuple):
    """The teams of a rank in a scan: inside its host, across hosts, where it is the last one, and for the broadcast."""

    place: _Place
    inside: PhaseGroup
    across: PhaseGroup
    down: PhaseGroup

    @property
    def blocks(self) -> int:
        """Return the blocks of the vector that suffice for all phases."""
        return lcm(*(team.used.blocks for team in (self.inside, self.across, self.down)))

    def copy(self, number: int) -> Part:
        """Return a copy of the vector in SCRATCH."""
        return Part(number * self.blocks, self.blocks, Buffer.SCRATCH)

    def carry(self, total: Part, carried: Part) -> Iterator[Stage]:
        """Yield the stages after which `carried` is what the hosts before contribute; `total` is what the own one does.

        There is nothing before the first host, so the broadcast there is left out.
        """
        yield self.across.stage(total, carried) if self.place.rank in self.across.group else self.across.idle()
        has_more = self.place.host and not self.down.is_idle
        yield self.down.stage(carried, carried, self.place.own[-1]) if has_more else self.down.idle()


def _scan(collective: str, place: _Place, inside: str, across: str, broadcast: str) -> _Scan:
    last = tuple(run[-1] for run in place.runs)
    return _Scan(
        place,
        PhaseGroup(method(collective, inside, place.sizes), place.own, place.rank),
        PhaseGroup(method("exscan", across, frozenset((len(last),))), last, place.rank),
        PhaseGroup(method("broadcast", broadcast, place.sizes), place.own, place.rank),
    )


def _finish(parts: Sequence[Part]) -> Stage:
    """Return the stage that leaves the combination of `parts`, in this order and lowered, in OUTPUT."""
    if not parts:
        return Stage(1, None)
    spans, target = tuple(part.span() for part in parts), Part(0, parts[0].length, Buffer.OUTPUT).span()
    step = Reduce(target, spans, lower=True) if len(spans) > 1 else Copy(target, spans[0], lower=True)
    return Stage(1, Group((step,)))


def _plan(name: tuple[str, str], scan: _Scan, root: int, stages: Sequence[Stage], *, kept: int) -> Plan:
    size, vector = sum(map(len, scan.place.runs)), even(scan.blocks)
    return composed(name, size, scan.place.rank, root, stages, input=vector, output=vector, kept=kept)
