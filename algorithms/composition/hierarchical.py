"""Hierarchical algorithms: collectives inside hosts and across hosts, as phases of one plan, at any number of levels.

Links inside a host are faster than those between hosts, so as little as possible should cross. *Leaders*: each host
combines what its ranks have at one of them, the leaders carry out the collective, and tell the others. *Full lane*: the
ranks of a host share the vector out, and each carries out the collective for its part with the ranks of the same place
on the other hosts, so that all ranks of a host use its links to the outside at once; hosts must be equal for that.

`hosts` says which ranks are on which host (`algorithms.hosts`), and each level has an algorithm of its own, by name. A
level's transport needs no name: channels belong to pairs of ranks (`algorithms.composition`). Reference: Träff, Hunold
2020; Luo et al. 2020.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import lcm, prod
from typing import NamedTuple

from unisono.algorithms.builders.arguments import check_ranks, check_supported
from unisono.algorithms.builders.tree import at_root
from unisono.algorithms.composition.embedding import Stage, Window, run_of_blocks, runs_between
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
from unisono.algorithms.composition.phase_groups import Method, Part, PhaseGroup, composed, inner_methods, method
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

    INPUT and OUTPUT are cut alike, in as many blocks as the phases need, and may be the same memory; SCRATCH is what
    the phase with most of it needs. The leaders are the first ranks of hosts, which may have different numbers of ranks
    and of levels.

    Raises:
        UsageError: `hosts` does not name every rank once, or an algorithm cannot be a phase.
        NoAlgorithmError: there is no such algorithm, or it does not support so many ranks.
    """
    check_ranks(size, rank, root)
    levels = levels_of(hosts, size)
    groups = led_by(levels, rank)
    up, down = inner_methods("reduce", reduce, levels), inner_methods("broadcast", broadcast, levels)
    top = method("allreduce", across, levels.sizes[0])
    blocks = lcm(*(used.blocks for used in (*up, top, *down)))
    stages, at = _towards_leaders(_teams(groups, up, rank), blocks, Buffer.OUTPUT)
    team = PhaseGroup(top, groups[0], rank)
    stages.append(
        team.stage(Part(0, blocks, at), Part(0, blocks, Buffer.OUTPUT), lower=True) if team.group else team.idle()
    )
    stages += _from_leaders(_teams(groups, down, rank), blocks)
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
    """Return the plan of a reduce inside hosts and then `across` their leaders; the root leads the hosts that it is in.

    INPUT, and OUTPUT of the root, may be the same memory. SCRATCH is that of the phase with most of it and, in the
    leaders, partial results. Otherwise as the allreduce.
    """
    check_ranks(size, rank, root)
    levels = levels_of(hosts, size)
    groups = led_by(levels, rank, root)
    up, top = inner_methods("reduce", reduce, levels), method("reduce", across, levels.sizes[0])
    blocks = lcm(*(used.blocks for used in (*up, top)))
    partial = Buffer.OUTPUT if rank == root else Buffer.SCRATCH
    stages, at = _towards_leaders(_teams(groups, up, rank), blocks, partial, root)
    team = PhaseGroup(top, groups[0], rank)
    stages.append(
        team.stage(Part(0, blocks, at), Part(0, blocks, partial), root, lower=True) if team.group else team.idle()
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
    """Return the plan of a broadcast `across` the leaders of hosts and then inside; the root leads the hosts it is in.

    The data is the INPUT of the root; all other ranks have no INPUT. Every rank ends with it in OUTPUT. Otherwise as
    the allreduce.
    """
    check_ranks(size, rank, root)
    levels = levels_of(hosts, size)
    groups = led_by(levels, rank, root)
    top, down = method("broadcast", across, levels.sizes[0]), inner_methods("broadcast", broadcast, levels)
    blocks = lcm(*(used.blocks for used in (top, *down)))
    team = PhaseGroup(top, groups[0], rank)
    whole = Part(0, blocks)
    first = team.stage(whole, whole.within(Buffer.OUTPUT), root) if team.group else team.idle()
    stages = (first, *_from_leaders(_teams(groups, down, rank), blocks, root))
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

    INPUT is a token of one element, SCRATCH receives those of others; there is no OUTPUT. Errors as in the allreduce.
    """
    check_ranks(size, rank, root)
    levels = levels_of(hosts, size)
    groups = led_by(levels, rank)
    inner, top = inner_methods("barrier", inside, levels), method("barrier", across, levels.sizes[0])
    teams = [PhaseGroup(used, groups[level], rank) for level, used in enumerate((top, *inner))]
    stages = [
        team.idle() if team.is_idle else team.stage(Part(0, 1), Part(0, 1)) for team in (*reversed(teams[1:]), *teams)
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
    """Return the plan of an allreduce that uses all ranks of equal hosts at once.

    Reduce-scatter inside hosts, allreduce `across` them by the ranks of each place on its part, allgather inside. INPUT
    and OUTPUT are cut alike, and may be the same memory; SCRATCH is what the phase with most of it needs.

    Raises:
        UsageError: `hosts` does not name every rank once, hosts are not equal, or an algorithm cannot be a phase.
    """
    check_ranks(size, rank, root)
    levels = levels_of(hosts, size)
    groups = in_lanes(levels, rank)
    scatter = _teams(groups, inner_methods("reduce_scatter", reduce_scatter, levels), rank)
    gather = _teams(groups, inner_methods("allgather", allgather, levels), rank)
    lane = PhaseGroup(method("allreduce", across, levels.sizes[0]), groups[0], rank)
    blocks = lane.used.blocks * prod(team.used.blocks for team in scatter)
    # What the groups share out, from the innermost one, and at last the rank's own part.
    parts = [Part(0, blocks, Buffer.OUTPUT)]
    for team in reversed(scatter):
        parts.append(parts[-1].share(len(team.group), team.group.index(rank)))
    own = parts[-1]
    has_combined = any(not team.is_idle for team in scatter)
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

    INPUT is one block, and may be the memory of block `rank` of OUTPUT, which is `size` blocks: equal ones or, if
    `varying`, by the counts of the ranks. Hosts have consecutive ranks, and may have different numbers of ranks and of
    levels.

    Raises:
        UsageError, NoAlgorithmError: as the allreduce, or hosts are not consecutive.
    """
    check_ranks(size, rank, root)
    seat = _seat(size, rank, hosts)
    up = inner_methods("gather", gather, seat.levels, by_shares=True)
    top = method("allgather", across, seat.levels.sizes[0], by_shares=True)
    down = inner_methods("broadcast", broadcast, seat.levels)
    stages = list[Stage]()
    for level, used in reversed([*enumerate((top, *up))]):
        team = seat.team(used, level)
        if team.is_idle and not (level == 0 and team.group):
            stages.append(team.idle())
        else:
            own = seat.own(level, Buffer.OUTPUT, alone=Buffer.INPUT)
            stages.append(team.between(own, seat.parts(level, Buffer.OUTPUT)))
    stages += _from_leaders(_teams(seat.groups, down, rank), size)
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

    INPUT is `size` blocks, by the counts of the ranks if `varying`; OUTPUT is one block, and may be the memory of block
    `rank` of INPUT. SCRATCH is that of the phase with most of it and, in the leaders, partial results. Hosts as in the
    allgather.
    """
    check_ranks(size, rank, root)
    seat = _seat(size, rank, hosts)
    up = inner_methods("reduce", reduce, seat.levels)
    top = method("reduce_scatter", across, seat.levels.sizes[0], by_shares=True)
    down = inner_methods("scatter", scatter, seat.levels, by_shares=True)
    stages, at = _towards_leaders(_teams(seat.groups, up, rank), size, Buffer.SCRATCH)
    for level, used in enumerate((top, *down)):
        team = seat.team(used, level)
        if team.is_idle and not (level == 0 and team.group):
            stages.append(team.idle())
        else:
            own = seat.own(level, at, alone=Buffer.OUTPUT)
            stages.append(team.between(seat.parts(level, at), own, lower=level == 0))
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


class _Seat(NamedTuple):
    """A rank among hosts of consecutive ranks, which lead and are led: who has what of a vector of shares."""

    levels: Levels
    groups: Groups
    rank: int

    def team(self, used: Method, level: int) -> PhaseGroup:
        """Return the team at a level."""
        return PhaseGroup(used, self.groups[level], self.rank)

    def parts(self, level: int, buffer: Buffer) -> Window:
        """Return where the shares of the parts of its host at a level lie in a buffer of all shares."""
        return runs_between(buffer, self._edges(level))

    def own(self, level: int, buffer: Buffer, alone: Buffer) -> Window:
        """Return where the shares of its part lie in a buffer of all shares, or in `alone` if the part is the rank."""
        edges, number = self._edges(level), self.groups[level].index(self.rank)
        width = edges[number + 1] - edges[number]
        return run_of_blocks(buffer, self.rank, width) if width > 1 else run_of_blocks(alone, 0, 1)

    def _edges(self, level: int) -> tuple[int, ...]:
        return (*self.groups[level], end_of(self.levels, self.rank, level))


def _seat(size: int, rank: int, hosts: Hosts | None) -> _Seat:
    levels = levels_of(hosts, size)
    check_supported(needs_runs(levels))
    return _Seat(levels, led_by(levels, rank), rank)


def _share_out(teams: Sequence[PhaseGroup], parts: Sequence[Part]) -> Iterator[Stage]:
    """Yield the stages that combine each of `parts` into the rank's share of it, the innermost one first."""
    at = Buffer.INPUT
    for team, (part, share) in zip(reversed(teams), pairwise(parts), strict=True):
        if team.is_idle:
            yield team.idle()
        else:
            yield team.stage(part.within(at), share)
            at = Buffer.OUTPUT


def _collect(teams: Sequence[PhaseGroup], parts: Sequence[Part]) -> Iterator[Stage]:
    """Yield the stages that collect each of `parts` from the shares of its group, the innermost one last."""
    for team, (share, part) in zip(teams, pairwise(reversed(parts)), strict=True):
        yield team.idle() if team.is_idle else team.stage(share, part)


def _teams(groups: Groups, inner: Sequence[Method], rank: int) -> list[PhaseGroup]:
    """Return the teams of a rank at the levels below the outermost one, from the outside."""
    return [PhaseGroup(used, groups[level], rank) for level, used in enumerate(inner, start=1)]


def _towards_leaders(
    teams: Sequence[PhaseGroup], blocks: int, partial: Buffer, root: int | None = None
) -> tuple[list[Stage], Buffer]:
    """Return the stages that combine, level by level, what is below each leader, and where a rank has it then.

    A rank that has combined nothing has its INPUT; others have states in `partial`.
    """
    stages, at = list[Stage](), Buffer.INPUT
    for team in reversed(teams):
        if team.is_idle:
            stages.append(team.idle())
            continue
        leader = team.leader(root)
        stages.append(team.stage(Part(0, blocks, at), Part(0, blocks, partial), leader))
        at = partial if team.rank == leader else at
    return stages, at


def _from_leaders(teams: Sequence[PhaseGroup], blocks: int, root: int | None = None) -> Iterator[Stage]:
    """Yield the stages in which leaders tell those below them, level by level, what they have in OUTPUT."""
    whole = Part(0, blocks, Buffer.OUTPUT)
    for team in teams:
        if team.is_idle:
            yield team.idle()
        else:
            yield team.stage(whole, whole, team.leader(root))
