"""Teams: groups of ranks with the algorithm of a phase, and the parts of vectors that phases work on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import lcm
from typing import NamedTuple, TypeAlias

from unisono.algorithms.algorithm import Algorithm
from unisono.algorithms.composition import Memory, Phase, Stage, Window, in_sequence, run_of_blocks, scratch_copies
from unisono.algorithms.hosts import Levels
from unisono.algorithms.moving import ALLGATHER, ALLTOALL, BARRIER, BROADCAST
from unisono.algorithms.plan import Buffer, Partition, Plan, Span, scratch_like
from unisono.algorithms.reducing import ALLREDUCE, EXSCAN, REDUCE, REDUCE_SCATTER, SCAN
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
