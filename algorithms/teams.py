"""Teams: groups of ranks with the algorithm of a phase, and the parts of vectors that phases work on."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import lcm
from typing import Any, NamedTuple, TypeAlias

from unisono.algorithms.algorithm import Algorithm, Cost
from unisono.algorithms.composition import Memory, Phase, Stage, Window, in_sequence, run_of_blocks, scratch_copies
from unisono.algorithms.hosts import Hosts, Levels, levels_of
from unisono.algorithms.plan import Buffer, Partition, Plan, Span, scratch_like
from unisono.errors import NoAlgorithmError, UsageError

# An algorithm with parameters of its builder or without, "knomial(radix=3)" or "ring", for all levels, or one for each
# level, from the outermost one that uses it.
Names: TypeAlias = str | tuple[str, ...]

# What a phase is told by the composition, not by its name.
_TOLD = ("size", "rank", "root", "varying", "hosts")


@dataclass(frozen=True, slots=True)
class PhaseKind:
    """A phase that a composition declares.

    Attributes:
        parameter: the parameter of the builder that names its algorithms.
        collective: what they carry out.
        is_inside: whether it runs inside hosts, at each level, and not across them.
        algorithms: those that the tuner chooses among; the first one is the default.
        fraction: of the vector, what groups of `size` ranks at `level` work on: a function of (levels, level, size).
        times: how often it runs.
    """

    parameter: str
    collective: str
    is_inside: bool
    algorithms: tuple[str, ...]
    fraction: Callable[[Levels, int, int], float] = lambda levels, level, size: 1.0
    times: int = 1

    def cost(self, levels: Levels, names: Names) -> Cost | None:
        """Return the cost: of each level, that of its most expensive group. None if an algorithm declares none.

        Raises:
            NoAlgorithmError, UsageError: as `algorithm_named` and `inner_names`.
        """
        inner = inner_names(self.collective, names, levels) if self.is_inside else (str(names),)
        of_levels = [self._cost_at(levels, level, name) for level, name in enumerate(inner, start=int(self.is_inside))]
        return total(self.times * of_levels)

    def _cost_at(self, levels: Levels, level: int, name: str) -> Cost | None:
        algorithm, params = algorithm_named(self.collective, name)
        fractions, costs = list[float](), list[Cost]()
        for size in levels.sizes[level]:
            if (cost := algorithm.cost_of(size, params)) is None:
                return None
            costs.append(cost)
            fractions.append(self.fraction(levels, level, size))
        return Cost(
            rounds=max(cost.rounds for cost in costs),
            sent=max(cost.sent * fraction for cost, fraction in zip(costs, fractions, strict=True)),
            reduced=max(cost.reduced * fraction for cost, fraction in zip(costs, fractions, strict=True)),
        )


def total(costs: Iterable[Cost | None]) -> Cost | None:
    """Return the cost of doing one after the other; None if one of them is not known."""
    known, unknown = list[Cost](), False
    for cost in costs:
        unknown = unknown or cost is None
        known += [] if cost is None else [cost]
    if unknown:
        return None
    return Cost(
        rounds=sum(cost.rounds for cost in known),
        sent=sum(cost.sent for cost in known),
        reduced=sum(cost.reduced for cost in known),
    )


@dataclass(frozen=True, slots=True)
class Composition(Algorithm):
    """An algorithm whose builder takes `hosts`, and the algorithms of its phases by name.

    Attributes:
        phases: in the order in which they run.
        levels: the levels of hosts that it looks at.
        between: what is done between the phases, as a function of the levels; it takes no messages.
        needs: None if it can run on these hosts, or the reason why it cannot.
    """

    cost: Callable[..., Cost] | None = field(init=False, compare=False, repr=False)
    phases: tuple[PhaseKind, ...] = ()
    levels: Callable[[Hosts | None, int], Levels] = levels_of
    between: Callable[[Levels], Cost] = lambda levels: Cost(rounds=0, sent=0, reduced=0)
    needs: Callable[[Levels], str | None] = lambda levels: None

    def __post_init__(self) -> None:
        object.__setattr__(self, "cost", lambda size, **params: self.cost_of(size, params))

    def cost_of(self, size: int, params: Mapping[str, Any]) -> Cost | None:
        """Return the sum of the costs of the phases on their parts of the vector.

        It is a bound where the busiest ranks of the phases need not be the same. None if a phase declares no cost.
        """
        levels = self.levels(params.get("hosts"), size)
        names = {phase: params.get(phase.parameter, phase.algorithms[0]) for phase in self.phases}
        return total((self.between(levels), *(phase.cost(levels, names[phase]) for phase in self.phases)))


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


def algorithm_named(collective: str, name: str) -> tuple[Algorithm, Mapping[str, Any]]:
    """Return the algorithm that a phase names, and the parameters of its builder.

    Raises:
        NoAlgorithmError: there is no such algorithm, or it is composed of phases itself.
        UsageError: it does not take such parameters.
    """
    # The registry lists the compositions, which are made with this: it can be asked only when all of them are there.
    from unisono.algorithms.registry import algorithms_of

    plain, params = _parsed(name)
    found = {each.name: each for each in algorithms_of(collective).values() if not isinstance(each, Composition)}
    if plain not in found:
        raise NoAlgorithmError(f"no phase can be {collective} {name!r}: it can be {', '.join(found)}")
    if told := ", ".join(each for each in params if each in _TOLD):
        raise UsageError(f"no phase can be {collective} {name!r}: a phase is told its {told}")
    if params:
        try:
            found[plain].check_parameters(params)
        except UsageError as error:
            raise UsageError(f"no phase can be {collective} {name!r}: {error}") from None
    return found[plain], params


@lru_cache(maxsize=64)
def _parsed(name: str) -> tuple[str, dict[str, Any]]:
    """Return the algorithm and the parameters in a name such as "knomial(radix=3)"."""
    try:
        found = ast.parse(name, mode="eval").body
        if isinstance(found, ast.Name):
            return found.id, {}
        if isinstance(found, ast.Call) and isinstance(found.func, ast.Name) and not found.args:
            return found.func.id, {str(each.arg): ast.literal_eval(each.value) for each in found.keywords}
    except (SyntaxError, TypeError, ValueError):
        pass
    raise UsageError(f"no phase can be {name!r}: name an algorithm, such as ring or knomial(radix=3)")


def inner_methods(collective: str, names: Names, levels: Levels, *, by_shares: bool = False) -> list[Method]:
    """Return the algorithms of the levels below the outermost one, from the outside.

    Raises:
        NoAlgorithmError, UsageError: as `method`.
        UsageError: there are not as many names as levels.
    """
    names = inner_names(collective, names, levels)
    found = zip(names, levels.sizes[1:], strict=True)
    return [method(collective, name, sizes, by_shares=by_shares) for name, sizes in found]


def inner_names(collective: str, names: Names, levels: Levels) -> tuple[str, ...]:
    """Return the name of the algorithm of each level below the outermost one, from the outside.

    Raises:
        UsageError: there are not as many names as levels.
    """
    inner = len(levels.sizes) - 1
    of_levels = (names,) * inner if isinstance(names, str) else names
    if len(of_levels) != inner:
        raise UsageError(f"{len(of_levels)} algorithms of {collective} are named for {inner} levels inside hosts")
    return of_levels


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
