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

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from math import lcm, prod
from typing import NamedTuple, TypeAlias

from unisono.algorithms.algorithm import Algorithm
from unisono.algorithms.checks import check_ranks
from unisono.algorithms.composition import (
    Memory,
    Phase,
    Stage,
    Window,
    in_sequence,
    run_of_blocks,
    scratch_copies,
)
from unisono.algorithms.hosts import Hosts, Levels, equal_hosts, in_lanes, led_by
from unisono.algorithms.moving import ALLGATHER, ALLTOALL, BARRIER, BROADCAST
from unisono.algorithms.plan import Buffer, Partition, Plan, Span, even, scratch_like
from unisono.algorithms.reducing import ALLREDUCE, EXSCAN, REDUCE, REDUCE_SCATTER, SCAN
from unisono.algorithms.tree import at_root
from unisono.errors import UsageError

# The name of an algorithm for all levels, or one for each level, from the outermost one that uses it.
Names: TypeAlias = str | tuple[str, ...]

_ALGORITHMS: Mapping[str, Mapping[str, Algorithm]] = {
    "allreduce": ALLREDUCE,
    "reduce": REDUCE,
    "reduce_scatter": REDUCE_SCATTER,
    "scan": SCAN,
    "exscan": EXSCAN,
    "broadcast": BROADCAST,
    "allgather": ALLGATHER,
    "alltoall": ALLTOALL,
    "barrier": BARRIER,
}


class Method(NamedTuple):
    """An algorithm for the groups of a level, with the blocks and the lanes that suffice for each of them."""

    algorithm: Algorithm
    blocks: int
    lanes: int


@lru_cache(maxsize=64)
def method(collective: str, name: str, sizes: frozenset[int]) -> Method:
    """Return the algorithm called `name`, for groups of `sizes` ranks.

    Raises:
        UsageError: there is no such algorithm, or it does not support a group.
    """
    of_collective = _ALGORITHMS[collective]
    if name not in of_collective:
        raise UsageError(f"no phase can be {collective} {name!r}: it can be {', '.join(of_collective)}")
    algorithm = of_collective[name]
    for size in sorted(sizes):
        if refusal := algorithm.supports(size):
            raise UsageError(f"no phase can be {collective} {name!r}: {refusal}")
    plans = [algorithm.build(size, 0) for size in sizes]
    blocks = lcm(*(max(plan.input.blocks, plan.output.blocks) for plan in plans))
    return Method(algorithm, blocks, max(len(plan.lanes) for plan in plans))


def inner_methods(collective: str, names: Names, levels: Levels) -> list[Method]:
    """Return the algorithms of the levels below the outermost one, from the outside.

    Raises:
        UsageError: as `method`, or there are not as many names as levels.
    """
    sizes = levels.sizes[1:]
    of_levels = (names,) * len(sizes) if isinstance(names, str) else names
    if len(of_levels) != len(sizes):
        raise UsageError(f"{len(of_levels)} algorithms of {collective} are named for {len(sizes)} levels inside hosts")
    return [method(collective, name, of_level) for name, of_level in zip(of_levels, sizes, strict=True)]


class Part(NamedTuple):
    """`length` consecutive blocks of a vector, of `buffer`."""

    first: int
    length: int
    buffer: Buffer = Buffer.INPUT

    def share(self, shares: int, number: int) -> Part:
        """Return one of so many equal shares."""
        length = self.length // shares
        return self._replace(first=self.first + number * length, length=length)

    def within(self, buffer: Buffer) -> Part:
        """Return the same part of `buffer`."""
        return self._replace(buffer=buffer)

    def span(self) -> Span:
        """Return the span of all its blocks."""
        return Span(self.buffer, self.first, self.length)

    def cut(self, blocks: int) -> Window:
        """Return the window of a buffer of so many equal blocks; of none, if its plan does not use it."""
        return run_of_blocks(self.buffer, self.first, self.length // max(blocks, 1))


class Team(NamedTuple):
    """A group with the algorithm of its phase, and one of its members, `rank`, whose part is looked at."""

    used: Method
    group: tuple[int, ...]
    rank: int

    @property
    def is_idle(self) -> bool:
        """Return whether the rank has nobody to do anything with."""
        return len(self.group) < 2

    def plan(self, root: int | None = None) -> Plan:
        """Return the rank's plan; `root` is a member, or None for the first one."""
        place = 0 if root is None else self.group.index(root)
        return self.used.algorithm.build(len(self.group), self.group.index(self.rank), place)

    def idle(self) -> Stage:
        """Return the stage in which the rank does nothing."""
        return Stage(self.used.lanes, None)

    def leader(self, root: int | None) -> int:
        """Return the leader of the group: the root if it is a member, or else the first one."""
        return root if root is not None and root in self.group else self.group[0]

    def between(self, source: Window, target: Window) -> Stage:
        """Return the stage that has the blocks of its INPUT in `source` and those of its OUTPUT in `target`."""
        return Stage(self.used.lanes, Phase(self.plan(), self.group, source, target))

    def stage(self, source: Part, target: Part, root: int | None = None, *, lower: bool = False) -> Stage:
        """Return the stage that has its INPUT in `source` and its OUTPUT in `target`; `root` as in `plan`."""
        plan = self.plan(root)
        return Stage(
            self.used.lanes,
            Phase(plan, self.group, source.cut(plan.input.blocks), target.cut(plan.output.blocks), lower),
        )


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
    """
    check_ranks(size, rank, root)
    levels = led_by(equal_hosts(size) if hosts is None else hosts, size)
    up, down = inner_methods("reduce", reduce, levels), inner_methods("broadcast", broadcast, levels)
    top = method("allreduce", across, levels.sizes[0])
    blocks = lcm(*(used.blocks for used in (*up, top, *down)))
    stages, at = _towards_leaders(_teams(levels, up, rank), blocks, Buffer.OUTPUT)
    team = Team(top, levels.group(rank, 0), rank)
    stages.append(
        team.stage(Part(0, blocks, at), Part(0, blocks, Buffer.OUTPUT), lower=True) if team.group else team.idle()
    )
    stages += _from_leaders(_teams(levels, down, rank), blocks)
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
    levels = led_by(equal_hosts(size) if hosts is None else hosts, size, root)
    up, top = inner_methods("reduce", reduce, levels), method("reduce", across, levels.sizes[0])
    blocks = lcm(*(used.blocks for used in (*up, top)))
    partial = Buffer.OUTPUT if rank == root else Buffer.SCRATCH
    stages, at = _towards_leaders(_teams(levels, up, rank), blocks, partial, root)
    team = Team(top, levels.group(rank, 0), rank)
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
    levels = led_by(equal_hosts(size) if hosts is None else hosts, size, root)
    top, down = method("broadcast", across, levels.sizes[0]), inner_methods("broadcast", broadcast, levels)
    blocks = lcm(*(used.blocks for used in (top, *down)))
    team = Team(top, levels.group(rank, 0), rank)
    whole = Part(0, blocks)
    first = team.stage(whole, whole.within(Buffer.OUTPUT), root) if team.group else team.idle()
    stages = (first, *_from_leaders(_teams(levels, down, rank), blocks, root))
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
    levels = led_by(equal_hosts(size) if hosts is None else hosts, size)
    inner, top = inner_methods("barrier", inside, levels), method("barrier", across, levels.sizes[0])
    teams = [Team(used, levels.group(rank, level), rank) for level, used in enumerate((top, *inner))]
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
    levels = in_lanes(equal_hosts(size) if hosts is None else hosts, size)
    scatter = inner_methods("reduce_scatter", reduce_scatter, levels)
    top, gather = method("allreduce", across, levels.sizes[0]), inner_methods("allgather", allgather, levels)
    blocks = top.blocks * prod(used.blocks for used in scatter)
    groups = [levels.group(rank, level) for level in levels.inwards()]
    # What the groups share out, from the innermost one, and at last the rank's own part.
    parts = [Part(0, blocks)]
    for group in reversed(groups):
        parts.append(parts[-1].share(len(group), group.index(rank)))
    stages, at = list[Stage](), Buffer.INPUT
    for used, group, (part, own) in zip(reversed(scatter), reversed(groups), pairwise(parts), strict=True):
        team = Team(used, group, rank)
        stages.append(team.idle() if team.is_idle else team.stage(part.within(at), own.within(Buffer.OUTPUT)))
        at = at if team.is_idle else Buffer.OUTPUT
    last = parts[-1]
    stages.append(Team(top, levels.group(rank, 0), rank).stage(last.within(at), last.within(Buffer.OUTPUT), lower=True))
    for used, group, (own, part) in zip(gather, groups, pairwise(reversed(parts)), strict=True):
        team = Team(used, group, rank)
        if team.is_idle:
            stages.append(team.idle())
        else:
            stages.append(team.stage(own.within(Buffer.OUTPUT), part.within(Buffer.OUTPUT)))
    vector = even(blocks)
    return composed(("allreduce", "full_lane"), size, rank, root, stages, input=vector, output=vector)


def _teams(levels: Levels, inner: Sequence[Method], rank: int) -> list[Team]:
    """Return the teams of a rank at the levels below the outermost one, from the outside."""
    return [Team(used, levels.group(rank, level), rank) for level, used in enumerate(inner, start=1)]


def _towards_leaders(
    teams: Sequence[Team], blocks: int, partial: Buffer, root: int | None = None
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


def _from_leaders(teams: Sequence[Team], blocks: int, root: int | None = None) -> Iterator[Stage]:
    """Yield the stages in which leaders tell those below them, level by level, what they have in OUTPUT."""
    whole = Part(0, blocks, Buffer.OUTPUT)
    for team in teams:
        if team.is_idle:
            yield team.idle()
        else:
            yield team.stage(whole, whole, team.leader(root))


def composed(
    name: tuple[str, str],
    size: int,
    rank: int,
    root: int,
    stages: Sequence[Stage],
    *,
    input: Partition,
    output: Partition,
    kept: int = 0,
) -> Plan:
    """Return the plan of `stages`, whose SCRATCH is copies of the vector, of which `kept` outlive a stage."""
    copies = scratch_copies(stages, kept)
    like, vector = (Buffer.INPUT, input) if input.blocks else (Buffer.OUTPUT, output)
    return Plan(
        *name,
        size=size,
        rank=rank,
        root=root,
        input=input,
        output=output,
        scratch=scratch_like(like, vector, copies) if copies else Partition(0),
        lanes=in_sequence(stages, Memory(vector.blocks, copies, kept)),
    )
