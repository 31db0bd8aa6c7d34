"""Groups of ranks with the algorithm of a phase, and the ranges of blocks on which phases work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import lcm
from typing import Any, NamedTuple

from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.composition.embedding import (
    BlockWindow,
    Phase,
    Stage,
    VectorMemory,
    in_sequence,
    run_of_blocks,
    scratch_copies,
)
from unisono.algorithms.composition.host_levels import Levels
from unisono.algorithms.composition.phases import Names, algorithm_named, inner_names
from unisono.algorithms.ir.plan import Buffer, Partition, Plan, Span, scratch_like
from unisono.errors import NoAlgorithmError, UsageError


class Method(NamedTuple):
    """An algorithm for the groups of ranks at one level, with the blocks and lanes that suffice for all their plans.

    Attributes:
        algorithm: the registered algorithm.
        params: the parameters for its builder.
        blocks: the least common multiple of the numbers of blocks of the plans.
        lanes: the largest number of lanes of a plan.
    """

    algorithm: Algorithm
    params: Mapping[str, Any]
    blocks: int
    lanes: int


def method(collective: str, name: str, sizes: frozenset[int], *, by_shares: bool = False) -> Method:
    """Return the algorithm with this name for groups of ranks, whose sizes are `sizes`.

    `by_shares` says that shares may differ in length.

    Raises:
        NoAlgorithmError: there is no such algorithm, or it does not support the size of a group.
        UsageError: the algorithm does not take these parameters.
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
            raise NoAlgorithmError(f"{refused} in groups of {size} ranks: {refusal}")
    try:
        plans = [algorithm.build(size, 0, **dict(params)) for size in sizes]
    except (UsageError, TypeError) as error:
        raise UsageError(f"{refused}: {error}") from error
    blocks = lcm(*(max(plan.input.blocks, plan.output.blocks) for plan in plans))
    return Method(algorithm, dict(params), blocks, max(len(plan.lanes) for plan in plans))


def inner_methods(collective: str, names: Names, levels: Levels, *, by_shares: bool = False) -> list[Method]:
    """Return the algorithms of the levels inside the outermost hosts, the outer levels first.

    Raises:
        NoAlgorithmError, UsageError: as `method`.
        UsageError: the number of names is not the number of these levels.
    """
    names = inner_names(collective, names, levels)
    by_level = zip(names, levels.sizes[1:], strict=True)
    return [method(collective, name, sizes, by_shares=by_shares) for name, sizes in by_level]


class BlockRange(NamedTuple):
    """`length` consecutive blocks of a vector in `buffer`, from block `first` on."""

    first: int
    length: int
    buffer: Buffer = Buffer.INPUT

    def share(self, shares: int, number: int) -> BlockRange:
        """Return part `number` of the range, cut into `shares` equal parts."""
        length = self.length // shares
        return self._replace(first=self.first + number * length, length=length)

    def within(self, buffer: Buffer) -> BlockRange:
        """Return the same range in another buffer."""
        return self._replace(buffer=buffer)

    def span(self) -> Span:
        """Return the span of all blocks of the range."""
        return Span(self.buffer, self.first, self.length)

    def cut(self, blocks: int) -> BlockWindow:
        """Return the range as a window of `blocks` equal blocks. If `blocks` is 0, the plan does not use the window.

        Raises:
            UsageError: the length of the range is not a multiple of `blocks`.
        """
        if blocks and self.length % blocks:
            raise UsageError(
                f"no phase can cut a vector of {self.length} shares into {blocks} equal blocks: choose another "
                "algorithm for this phase"
            )
        return run_of_blocks(self.buffer, self.first, self.length // max(blocks, 1))


class PhaseGroup(NamedTuple):
    """The group of ranks that carries out a phase, seen by its member `rank`."""

    method: Method
    members: tuple[int, ...]
    rank: int

    @property
    def is_idle(self) -> bool:
        """Return whether the group has fewer than two members, so that there is nothing to do."""
        return len(self.members) < 2

    def plan(self, root: int | None = None) -> Plan:
        """Return the plan of this rank. `root` is a member; None means the first member."""
        root_index = 0 if root is None else self.members.index(root)
        return self.method.algorithm.build(
            len(self.members), self.members.index(self.rank), root_index, **self.method.params
        )

    def idle(self) -> Stage:
        """Return a stage in which the rank does nothing. It takes as many lanes as the phase."""
        return Stage(self.method.lanes, None)

    def leader(self, root: int | None) -> int:
        """Return the leader of the group: the root if it is a member, else the first member."""
        return root if root is not None and root in self.members else self.members[0]

    def between(self, source: BlockWindow, target: BlockWindow, *, lower: bool = False) -> Stage:
        """Return the stage of this rank. The phase has its INPUT in the window `source` and its OUTPUT in `target`."""
        return Stage(self.method.lanes, Phase(self.plan(), self.members, source, target, lower))

    def stage(self, source: BlockRange, target: BlockRange, root: int | None = None, *, lower: bool = False) -> Stage:
        """Return the stage of this rank, with INPUT in `source` and OUTPUT in `target`; `root` as in `plan`."""
        plan = self.plan(root)
        return Stage(
            self.method.lanes,
            Phase(plan, self.members, source.cut(plan.input.blocks), target.cut(plan.output.blocks), lower),
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
    """Return the plan that runs `stages` one after the other.

    SCRATCH consists of copies of the vector; the first `kept` copies hold values that outlive a stage.
    """
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
        lanes=in_sequence(stages, VectorMemory(vector.blocks, copies, kept)),
    )
