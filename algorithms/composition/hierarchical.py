"""Hierarchical algorithms: collectives inside hosts and across hosts, as phases of one plan, for any number of levels.

Links inside a host are faster than links between hosts, so as little data as possible should cross hosts.

- *Leaders*: each host combines the data of its ranks at one rank, the leader. The leaders carry out the collective, and
  then pass the result to the other ranks.
- *Full lane*: the ranks of a host split the vector among them. Each rank carries out the collective for its part, with
  the ranks of the same position on the other hosts. So all ranks of a host use its outside links at once. This needs
  hosts of equal size.

`hosts` says which ranks are on which host (`composition.host_levels`), and each level has an algorithm of its own, by
name. No transport is named: channels belong to pairs of ranks (`composition.embedding`). Reference: Träff, Hunold 2020;
Luo et al. 2020.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import lcm, prod
from typing import NamedTuple

from unisono.algorithms.builders.arguments import check_ranks, check_supported
from unisono.algorithms.builders.tree import at_root
from unisono.algorithms.composition.embedding import BlockWindow, Stage, run_of_blocks, runs_between
from unisono.algorithms.composition.host_levels import (
    Groups,
    Hosts,
    Levels,
    end_of,
    in_lanes,
    led_by,
    levels_of,
    needs_runs,
)
from unisono.algorithms.composition.phase_groups import BlockRange, Method, PhaseGroup, composed, inner_methods, method
from unisono.algorithms.composition.phases import Names
from unisono.algorithms.ir.plan import Buffer, Partition, Plan, even, shares


def allreduce_hierarchical(
    size: int,
    rank: int,
    root: int = 0,
    *,
    hosts: Hosts | None = None,
    reduce: Names = "binomial",
    across: str = "recursive_doubling",
    broadcast: Names = "binomial",
) -> Plan:
    """Return the plan of an allreduce by leaders: reduce inside hosts, allreduce `across` them, broadcast inside.

    INPUT and OUTPUT are cut alike, into as many blocks as the phases need, and may be the same memory. SCRATCH is the
    SCRATCH of the phase that needs most. The leader of a host is its first rank. Hosts may have different numbers of
    ranks and of levels.

    Raises:
        UsageError: `hosts` does not name every rank once, or an algorithm cannot be a phase.
        NoAlgorithmError: there is no such algorithm, or it does not support this number of ranks.
    """
    check_ranks(size, rank, root)
    levels = levels_of(hosts, size)
    groups = led_by(levels, rank)
    up, down = inner_methods("reduce", reduce, levels), inner_methods("broadcast", broadcast, levels)
    top = method("allreduce", across, levels.sizes[0])
    blocks = lcm(*(used.blocks for used in (*up, top, *down)))
    stages, at = _towards_leaders(_phase_groups(groups, up, rank), blocks, Buffer.OUTPUT)
    group = PhaseGroup(top, groups[0], rank)
    stages.append(
        group.stage(BlockRange(0, blocks, at), BlockRange(0, blocks, Buffer.OUTPUT), lower=True)
        if group.members
        else group.idle()
    )
    stages += _from_leaders(_phase_groups(groups, down, rank), blocks)
    vector = even(blocks)
    return composed(("allreduce", "hierarchical"), size, rank, root, stages, input=vector, output=vector)


def reduce_hierarchical(
    size: int,
    rank: int,
    root: int = 0,
    *,
    hosts: Hosts | None = None,
    reduce: Names = "binomial",
    across: str = "binomial",
) -> Plan:
    """Return the plan of a reduce inside hosts, and then `across` their leaders. The root leads its own hosts.

    INPUT and the root's OUTPUT may be the same memory. SCRATCH is the SCRATCH of the phase that needs most; leaders
    also keep partial results there. Blocks, hosts and errors are as in `allreduce_hierarchical`.
    """
    check_ranks(size, rank, root)
    levels = levels_of(hosts, size)
    groups = led_by(levels, rank, root)
    up, top = inner_methods("reduce", reduce, levels), method("reduce", across, levels.sizes[0])
    blocks = lcm(*(used.blocks for used in (*up, top)))
    partial = Buffer.OUTPUT if rank == root else Buffer.SCRATCH
    stages, at = _towards_leaders(_phase_groups(groups, up, rank), blocks, partial, root)
    group = PhaseGroup(top, groups[0], rank)
    stages.append(
        group.stage(BlockRange(0, blocks, at), BlockRange(0, blocks, partial), root, lower=True)
        if group.members
        else group.idle()
    )
    return composed(
        ("reduce", "hierarchical"),
        size,
        rank,
        root,
        stages,
        input=even(blocks),
        output=at_root(rank, root, even(blocks)),
        kept=int(at is Buffer.SCRATCH),
    )


def broadcast_hierarchical(
    size: int,
    rank: int,
    root: int = 0,
    *,
    hosts: Hosts | None = None,
    across: str = "binomial",
    broadcast: Names = "binomial",
) -> Plan:
    """Return the plan of a broadcast `across` the leaders of hosts, and then inside. The root leads its own hosts.

    The data is the INPUT of the root; the other ranks have no INPUT. Every rank ends with the data in OUTPUT. Blocks,
    hosts and errors are as in `allreduce_hierarchical`.
    """
    check_ranks(size, rank, root)
    levels = levels_of(hosts, size)
    groups = led_by(levels, rank, root)
    top, down = method("broadcast", across, levels.sizes[0]), inner_methods("broadcast", broadcast, levels)
    blocks = lcm(*(used.blocks for used in (top, *down)))
    group = PhaseGroup(top, groups[0], rank)
    whole = BlockRange(0, blocks)
    first = group.stage(whole, whole.within(Buffer.OUTPUT), root) if group.members else group.idle()
    stages = (first, *_from_leaders(_phase_groups(groups, down, rank), blocks, root))
    source = at_root(rank, root, even(blocks))
    return composed(("broadcast", "hierarchical"), size, rank, root, stages, input=source, output=even(blocks))


def barrier_hierarchical(
    size: int,
    rank: int,
    root: int = 0,
    *,
    hosts: Hosts | None = None,
    inside: Names = "dissemination",
    across: str = "dissemination",
) -> Plan:
    """Return the plan of a barrier inside hosts, then `across` their leaders, then inside hosts once more.

    INPUT is a token of one element, SCRATCH receives the tokens of other ranks, and there is no OUTPUT. Errors are as
    in `allreduce_hierarchical`.
    """
    check_ranks(size, rank, root)
    levels = levels_of(hosts, size)
    groups = led_by(levels, rank)
    inner, top = inner_methods("barrier", inside, levels), method("barrier", across, levels.sizes[0])
    phase_groups = [PhaseGroup(used, groups[level], rank) for level, used in enumerate((top, *inner))]
    stages = [
        group.idle() if group.is_idle else group.stage(BlockRange(0, 1), BlockRange(0, 1))
        for group in (*reversed(phase_groups[1:]), *phase_groups)
    ]
    return composed(("barrier", "hierarchical"), size, rank, root, stages, input=even(1), output=Partition(0))


def allreduce_full_lane(
    size: int,
    rank: int,
    root: int = 0,
    *,
    hosts: Hosts | None = None,
    reduce_scatter: Names = "ring",
    across: str = "ring",
    allgather: Names = "ring",
) -> Plan:
    """Return the plan of an allreduce in which all ranks of equal hosts send to other hosts at once.

    The phases are a reduce-scatter inside hosts, an allreduce `across` hosts of each part of the vector, and an
    allgather inside hosts. INPUT and OUTPUT are cut alike, and may be the same memory. SCRATCH is the SCRATCH of the
    phase that needs most.

    Raises:
        UsageError: `hosts` does not name every rank once, hosts are not equal, or an algorithm cannot be a phase.
    """
    check_ranks(size, rank, root)
    levels = levels_of(hosts, size)
    groups = in_lanes(levels, rank)
    scatter = _phase_groups(groups, inner_methods("reduce_scatter", reduce_scatter, levels), rank)
    gather = _phase_groups(groups, inner_methods("allgather", allgather, levels), rank)
    lane = PhaseGroup(method("allreduce", across, levels.sizes[0]), groups[0], rank)
    blocks = lane.method.blocks * prod(group.method.blocks for group in scatter)
    # The ranges that the groups split, the innermost group first; the last range is the rank's own part.
    parts = [BlockRange(0, blocks, Buffer.OUTPUT)]
    for group in reversed(scatter):
        parts.append(parts[-1].share(len(group.members), group.members.index(rank)))
    own = parts[-1]
    has_combined = any(not group.is_idle for group in scatter)
    stages = [
        *_share_out(scatter, parts),
        lane.stage(own if has_combined else own.within(Buffer.INPUT), own, lower=True),
        *_collect(gather, parts),
    ]
    vector = even(blocks)
    return composed(("allreduce", "full_lane"), size, rank, root, stages, input=vector, output=vector)


def allgather_hierarchical(
    size: int,
    rank: int,
    root: int = 0,
    *,
    varying: bool = False,
    hosts: Hosts | None = None,
    gather: Names = "binomial",
    across: str = "circulant",
    broadcast: Names = "binomial",
) -> Plan:
    """Return the plan of an allgather by leaders: gather inside hosts, allgather `across` leaders, broadcast inside.

    INPUT is one block, and may be the memory of block `rank` of OUTPUT. OUTPUT is `size` blocks: equal ones or, if
    `varying`, by the counts of the ranks. Hosts have consecutive ranks, and may have different numbers of ranks and of
    levels.

    Raises:
        UsageError, NoAlgorithmError: as `allreduce_hierarchical`, or the ranks of a host are not consecutive.
    """
    check_ranks(size, rank, root)
    layout = _share_layout(size, rank, hosts)
    up = inner_methods("gather", gather, layout.levels, by_shares=True)
    top = method("allgather", across, layout.levels.sizes[0], by_shares=True)
    down = inner_methods("broadcast", broadcast, layout.levels)
    stages = list[Stage]()
    for level, used in reversed([*enumerate((top, *up))]):
        group = layout.group(used, level)
        if group.is_idle and not (level == 0 and group.members):
            stages.append(group.idle())
        else:
            own = layout.own(level, Buffer.OUTPUT, alone=Buffer.INPUT)
            stages.append(group.between(own, layout.parts(level, Buffer.OUTPUT)))
    stages += _from_leaders(_phase_groups(layout.groups, down, rank), size)
    output = shares(size, varying)
    return composed(("allgather", "hierarchical"), size, rank, root, stages, input=even(1), output=output)


def reduce_scatter_hierarchical(
    size: int,
    rank: int,
    root: int = 0,
    *,
    varying: bool = False,
    hosts: Hosts | None = None,
    reduce: Names = "binomial",
    across: str = "recursive_halving",
    scatter: Names = "binomial",
) -> Plan:
    """Return the plan of a reduce-scatter by leaders: reduce inside, reduce-scatter `across` leaders, scatter inside.

    INPUT is `size` blocks: equal ones or, if `varying`, by the counts of the ranks. OUTPUT is one block, and may be the
    memory of block `rank` of INPUT. SCRATCH is the SCRATCH of the phase that needs most; leaders also keep partial
    results there. Hosts are as in `allgather_hierarchical`.
    """
    check_ranks(size, rank, root)
    layout = _share_layout(size, rank, hosts)
    up = inner_methods("reduce", reduce, layout.levels)
    top = method("reduce_scatter", across, layout.levels.sizes[0], by_shares=True)
    down = inner_methods("scatter", scatter, layout.levels, by_shares=True)
    stages, at = _towards_leaders(_phase_groups(layout.groups, up, rank), size, Buffer.SCRATCH)
    for level, used in enumerate((top, *down)):
        group = layout.group(used, level)
        if group.is_idle and not (level == 0 and group.members):
            stages.append(group.idle())
        else:
            own = layout.own(level, at, alone=Buffer.OUTPUT)
            stages.append(group.between(layout.parts(level, at), own, lower=level == 0))
    return composed(
        ("reduce_scatter", "hierarchical"),
        size,
        rank,
        root,
        stages,
        input=shares(size, varying),
        output=even(1),
        kept=int(at is Buffer.SCRATCH),
    )


class _ShareLayout(NamedTuple):
    """Where one rank finds the shares of its host and of its own part, in a vector with one share for each rank.

    Hosts have consecutive ranks, and their first ranks lead them.
    """

    levels: Levels
    groups: Groups
    rank: int

    def group(self, used: Method, level: int) -> PhaseGroup:
        """Return the group of the rank at a level."""
        return PhaseGroup(used, self.groups[level], self.rank)

    def parts(self, level: int, buffer: Buffer) -> BlockWindow:
        """Return the window of a vector of all shares, with one block for each part of the rank's host at a level."""
        return runs_between(buffer, self._edges(level))

    def own(self, level: int, buffer: Buffer, alone: Buffer) -> BlockWindow:
        """Return the window of the shares of the rank's own part at a level.

        It lies in `buffer`, a vector of all shares, or in `alone` if the part is just this rank.
        """
        edges, number = self._edges(level), self.groups[level].index(self.rank)
        width = edges[number + 1] - edges[number]
        return run_of_blocks(buffer, self.rank, width) if width > 1 else run_of_blocks(alone, 0, 1)

    def _edges(self, level: int) -> tuple[int, ...]:
        return (*self.groups[level], end_of(self.levels, self.rank, level))


def _share_layout(size: int, rank: int, hosts: Hosts | None) -> _ShareLayout:
    levels = levels_of(hosts, size)
    check_supported(needs_runs(levels))
    return _ShareLayout(levels, led_by(levels, rank), rank)


def _share_out(phase_groups: Sequence[PhaseGroup], parts: Sequence[BlockRange]) -> Iterator[Stage]:
    """Yield the stages that reduce-scatter each of `parts`, the innermost group first."""
    at = Buffer.INPUT
    for group, (part, share) in zip(reversed(phase_groups), pairwise(parts), strict=True):
        if group.is_idle:
            yield group.idle()
        else:
            yield group.stage(part.within(at), share)
            at = Buffer.OUTPUT


def _collect(phase_groups: Sequence[PhaseGroup], parts: Sequence[BlockRange]) -> Iterator[Stage]:
    """Yield the stages that allgather each of `parts` from the shares of its group, the innermost group last."""
    for group, (share, part) in zip(phase_groups, pairwise(reversed(parts)), strict=True):
        yield group.idle() if group.is_idle else group.stage(share, part)


def _phase_groups(groups: Groups, inner: Sequence[Method], rank: int) -> list[PhaseGroup]:
    """Return the groups of a rank at the levels inside the outermost hosts, the outer levels first."""
    return [PhaseGroup(used, groups[level], rank) for level, used in enumerate(inner, start=1)]


def _towards_leaders(
    phase_groups: Sequence[PhaseGroup], blocks: int, partial: Buffer, root: int | None = None
) -> tuple[list[Stage], Buffer]:
    """Return the stages that reduce to the leaders, level by level, and the buffer that then has this rank's data.

    The buffer is INPUT if the rank has combined nothing, else `partial`.
    """
    stages, at = list[Stage](), Buffer.INPUT
    for group in reversed(phase_groups):
        if group.is_idle:
            stages.append(group.idle())
            continue
        leader = group.leader(root)
        stages.append(group.stage(BlockRange(0, blocks, at), BlockRange(0, blocks, partial), leader))
        at = partial if group.rank == leader else at
    return stages, at


def _from_leaders(phase_groups: Sequence[PhaseGroup], blocks: int, root: int | None = None) -> Iterator[Stage]:
    """Yield the stages in which leaders broadcast their OUTPUT to their groups, level by level."""
    whole = BlockRange(0, blocks, Buffer.OUTPUT)
    for group in phase_groups:
        if group.is_idle:
            yield group.idle()
        else:
            yield group.stage(whole, whole, group.leader(root))
