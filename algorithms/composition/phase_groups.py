"""Teams: groups of ranks with the algorithm of a phase, and the parts of vectors that phases work on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import lcm
from typing import Any, NamedTuple

from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.composition.embedding import (
    Memory,
    Phase,
    Stage,
    Window,
    in_sequence,
    run_of_blocks,
    scratch_copies,
)
from unisono.algorithms.composition.host_levels import Levels
from unisono.algorithms.composition.phases import Names, algorithm_named, inner_names
from unisono.algorithms.ir.plan import Buffer, Partition, Plan, Span, scratch_like
from unisono.errors import NoAlgorithmError, UsageError


class Method(NamedTuple):
    """An algorithm for the groups of a level, with the blocks and the lanes that suffice for each of them.

    Attributes:
        algorithm: what is registered.
        params: the parameters of its builder.
        blocks, lanes: of the plans of all groups, together and at most.
    """

    algorithm: Algorithm
    params: Mapping[str, Any]
    blocks: int
    lanes: int


def method(collective: str, name: str, sizes: frozenset[int], *, by_shares: bool = False) -> Method:
    """Return the algorithm called `name`, for groups of `sizes` ranks; `by_shares`: whose shares differ in length.

    Raises:
        NoAlgorithmError: there is no such algorithm, or it does not support a group.
        UsageError: it does not take such parameters.
    """
    algorithm, params = algorithm_named(collective, name)
    if by_shares and not algorithm.varying:
        raise NoAlgorithmError(f"no phase can be {collective} {name!r}: it needs shares of equal length")
    return _for_groups(algorithm, name, (*params.items(), *((("varying", True),) if by_shares else ())), sizes)


@lru_cache(maxsize=64)
def _for_groups(algorithm: Algorithm, name: str, params: tuple[tuple[str, Any], ...], sizes: frozenset[int]) -> Method:
    refused = f"no phase can be {algorithm.collective} {name!r}"
    for size in sorted(sizes):
        if refusal := algorithm.supports(size):
            raise NoAlgorithmError(f"{refused}: {refusal}")
    try:
        plans = [algorithm.build(size, 0, **dict(params)) for size in sizes]
    except (UsageError, TypeError) as error:
        raise UsageError(f"{refused}: {error}") from error
    blocks = lcm(*(max(plan.input.blocks, plan.output.blocks) for plan in plans))
    return Method(algorithm, dict(params), blocks, max(len(plan.lanes) for plan in plans))


def inner_methods(collective: str, names: Names, levels: Levels, *, by_shares: bool = False) -> list[Method]:
    """Return the algorithms of the levels below the outermost one, from the outside.

    Raises:
        NoAlgorithmError, UsageError: as `method`.
        UsageError: there are not as many names as levels.
    """
    names = inner_names(collective, names, levels)
    found = zip(names, levels.sizes[1:], strict=True)
    return [method(collective, name, sizes, by_shares=by_shares) for name, sizes in found]


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
        """Return the window of a buffer of so many equal blocks; of none, if its plan does not use it.

        Raises:
            UsageError: it cannot be cut into so many.
        """
        if blocks and self.length % blocks:
            raise UsageError(f"no phase can cut a vector of {self.length} shares into {blocks} equal blocks")
        return run_of_blocks(self.buffer, self.first, self.length // max(blocks, 1))


class PhaseGroup(NamedTuple):
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
        return self.used.algorithm.build(len(self.group), self.group.index(self.rank), place, **self.used.params)

    def idle(self) -> Stage:
        """Return the stage in which the rank does nothing."""
        return Stage(self.used.lanes, None)

    def leader(self, root: int | None) -> int:
        """Return the leader of the group: the root if it is a member, or else the first one."""
        return root if root is not None and root in self.group else self.group[0]

    def between(self, source: Window, target: Window, *, lower: bool = False) -> Stage:
        """Return the stage that has the blocks of its INPUT in `source` and those of its OUTPUT in `target`."""
        return Stage(self.used.lanes, Phase(self.plan(), self.group, source, target, lower))

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
    like, vector = (Buffer.INPUT, input) if input.blocks >= output.blocks else (Buffer.OUTPUT, output)
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
