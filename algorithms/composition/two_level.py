"""Two-level algorithms for all-to-all and scans: each pair of hosts exchanges few long messages.

All-to-all has two phases. First, the ranks of a host exchange blocks. The rank with local index i then has all blocks
of its host for the ranks with local index i on any host. Second, the ranks with the same local index exchange across
hosts. One message carries all blocks from one host to one rank of another. With h hosts of q ranks, every rank sends h
− 1 messages to other hosts instead of (h − 1)·q.

A scan has three phases. Each host scans its own ranks, so that its last rank has the total of the host. The last ranks
of the hosts do an exclusive scan of these totals. Then they broadcast the result inside their hosts. Reference:
Sanders, Träff 2006; Träff, Rougier 2014.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from math import lcm
from typing import NamedTuple

from unisono.algorithms.builders.arguments import check_ranks, check_supported
from unisono.algorithms.composition.embedding import BlockWindow, Stage, run_of_blocks
from unisono.algorithms.composition.host_levels import Hosts, levels_of, needs_equal, runs_of_ranks
from unisono.algorithms.composition.phase_groups import BlockRange, PhaseGroup, composed, method
from unisono.algorithms.ir.plan import Buffer, Copy, Group, Plan, Reduce, even


class _HostPosition(NamedTuple):
    """A rank and its host, where each host is a run of consecutive ranks."""

    runs: tuple[tuple[int, ...], ...]
    host: int
    rank: int

    @property
    def host_ranks(self) -> tuple[int, ...]:
        """Return the ranks of this host."""
        return self.runs[self.host]

    @property
    def sizes(self) -> frozenset[int]:
        """Return the numbers of ranks of the hosts, without duplicates."""
        return frozenset(map(len, self.runs))


def _host_position(size: int, rank: int, hosts: Hosts | None) -> _HostPosition:
    runs = runs_of_ranks(hosts, size)
    return _HostPosition(runs, bisect_right(runs, rank, key=lambda run: run[0]) - 1, rank)


def alltoall_two_level(
    size: int,
    rank: int,
    root: int = 0,
    *,
    hosts: Hosts | None = None,
    inside: str = "direct",
    across: str = "pairwise",
) -> Plan:
    """Return the plan of an alltoall `inside` hosts and then `across` hosts, which are equal runs of consecutive ranks.

    INPUT, OUTPUT and SCRATCH are `size` equal blocks each. INPUT and OUTPUT must not be the same memory.

    Raises:
        UsageError: hosts are not equal or not consecutive, or an algorithm cannot be a phase.
        NoAlgorithmError: there is no such algorithm, or it does not support this number of ranks.
    """
    check_ranks(size, rank, root)
    position = _host_position(size, rank, hosts)
    check_supported(needs_equal(levels_of(position.runs, size)))
    ranks, hosts_count = position.host_ranks, len(position.runs)
    peers_across = tuple(run[ranks.index(rank)] for run in position.runs)
    inner = PhaseGroup(method("alltoall", inside, position.sizes), ranks, rank)
    outer = PhaseGroup(method("alltoall", across, frozenset((hosts_count,))), peers_across, rank)
    # With q ranks per host, block h·q + i of SCRATCH comes from local index i of this host and goes on to host h.
    unsorted, by_host = (
        BlockWindow(buffer, 0, hosts_count, 1, len(ranks)) for buffer in (Buffer.INPUT, Buffer.SCRATCH)
    )
    source = Buffer.INPUT if inner.is_idle else Buffer.SCRATCH
    stages = (
        inner.idle() if inner.is_idle else inner.between(unsorted, by_host),
        outer.between(run_of_blocks(source, 0, len(ranks)), run_of_blocks(Buffer.OUTPUT, 0, len(ranks))),
    )
    return composed(
        ("alltoall", "two_level"),
        size,
        rank,
        root,
        stages,
        input=even(size),
        output=even(size),
        kept=int(source is Buffer.SCRATCH),
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

    INPUT and OUTPUT are cut alike, into as many blocks as the broadcast needs, and may be the same memory. SCRATCH is
    one copy for the total of the earlier hosts, and the SCRATCH of the phase that needs most. Contributions are
    combined in ascending order. Hosts may have different numbers of ranks.

    Raises:
        UsageError: hosts are not consecutive, or an algorithm cannot be a phase.
        NoAlgorithmError: as `alltoall_two_level`.
    """
    check_ranks(size, rank, root)
    scan = _scan("scan", _host_position(size, rank, hosts), inside, across, broadcast)
    whole, group = BlockRange(0, scan.blocks), scan.inside
    prefix = whole if group.is_idle else whole.within(Buffer.OUTPUT)
    carried = scan.copy(0)
    stages = (
        group.idle() if group.is_idle else group.stage(whole, prefix),
        *scan.carry(prefix, carried),
        _finish((carried, prefix) if scan.position.host else (prefix,)),
    )
    return _plan(("scan", "two_level"), scan, root, stages, kept=min(scan.position.host, 1))


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

    Buffers and errors are as in `scan_two_level`, with two differences: rank 0 does not write OUTPUT, and SCRATCH has
    one more copy.
    """
    check_ranks(size, rank, root)
    scan = _scan("exscan", _host_position(size, rank, hosts), inside, across, broadcast)
    whole, group, is_first = BlockRange(0, scan.blocks), scan.inside, scan.position.host_ranks[0] == rank
    prefix, carried = scan.copy(0), scan.copy(1)
    # The last rank of a host computes the total of its host if another host follows.
    adds = rank == scan.position.host_ranks[-1] and not is_first and rank < size - 1
    total = whole.within(Buffer.OUTPUT) if adds else whole
    parts = ((carried,) if scan.position.host else ()) + (() if is_first else (prefix,))
    stages = (
        group.idle() if group.is_idle else group.stage(whole, prefix),
        Stage(1, Group((Reduce(total.span(), (prefix.span(), whole.span())),)) if adds else None),
        *scan.carry(total, carried),
        _finish(parts),
    )
    return _plan(("exscan", "two_level"), scan, root, stages, kept=2)


class _Scan(NamedTuple):
    """The phases of a rank in a scan: the scan `inside` its host, the exscan `across`, the broadcast `down`."""

    position: _HostPosition
    inside: PhaseGroup
    across: PhaseGroup
    down: PhaseGroup

    @property
    def blocks(self) -> int:
        """Return the number of blocks of the vector: the least common multiple of the blocks of the three phases."""
        return lcm(*(group.method.blocks for group in (self.inside, self.across, self.down)))

    def copy(self, number: int) -> BlockRange:
        """Return copy `number` of the vector in SCRATCH."""
        return BlockRange(number * self.blocks, self.blocks, Buffer.SCRATCH)

    def carry(self, total: BlockRange, carried: BlockRange) -> Iterator[Stage]:
        """Yield the stages that read the total of this host in `total` and write that of earlier hosts to `carried`.

        The first host has no earlier hosts, so it skips the broadcast.
        """
        yield self.across.stage(total, carried) if self.position.rank in self.across.members else self.across.idle()
        has_more = self.position.host and not self.down.is_idle
        yield self.down.stage(carried, carried, self.position.host_ranks[-1]) if has_more else self.down.idle()


def _scan(collective: str, position: _HostPosition, inside: str, across: str, broadcast: str) -> _Scan:
    last = tuple(run[-1] for run in position.runs)
    return _Scan(
        position,
        PhaseGroup(method(collective, inside, position.sizes), position.host_ranks, position.rank),
        PhaseGroup(method("exscan", across, frozenset((len(last),))), last, position.rank),
        PhaseGroup(method("broadcast", broadcast, position.sizes), position.host_ranks, position.rank),
    )


def _finish(parts: Sequence[BlockRange]) -> Stage:
    """Return the stage that combines `parts` in this order, and writes the final result to OUTPUT."""
    if not parts:
        return Stage(1, None)
    spans, target = tuple(part.span() for part in parts), BlockRange(0, parts[0].length, Buffer.OUTPUT).span()
    step = Reduce(target, spans, lower=True) if len(spans) > 1 else Copy(target, spans[0], lower=True)
    return Stage(1, Group((step,)))


def _plan(name: tuple[str, str], scan: _Scan, root: int, stages: Sequence[Stage], *, kept: int) -> Plan:
    size, vector = sum(map(len, scan.position.runs)), even(scan.blocks)
    return composed(name, size, scan.position.rank, root, stages, input=vector, output=vector, kept=kept)
