"""Compositions as data: phases, the algorithms that may run each phase, and the cost of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any, TypeAlias

from unisono.algorithms.catalogue.algorithm import Algorithm, Cost
from unisono.algorithms.catalogue.flat import flat_algorithms_of
from unisono.algorithms.catalogue.variants import parsed
from unisono.algorithms.composition.host_levels import Hosts, Levels, levels_of
from unisono.errors import NoAlgorithmError, UsageError
from unisono.foundation.records import record

# The algorithm of a phase, with parameters of its builder or without, such as "knomial(radix=3)" or "ring". One name is
# for all levels of hosts; a tuple has one name for each level that the phase runs at, the outermost level first.
Names: TypeAlias = str | tuple[str, ...]

# The arguments of a builder that the composition passes, so that the name of a phase must not set them.
_SET_BY_COMPOSITION = ("size", "rank", "root", "varying", "hosts")


@record
class PhaseKind:
    """A phase that a composition declares.

    Attributes:
        parameter: the parameter of the composition's builder that names the algorithm of this phase.
        collective: the collective that the phase carries out.
        is_inside: whether the phase runs inside hosts, at every level, or else across the outermost hosts.
        algorithms: the algorithms among which the tuner chooses; the first one is the default.
        fraction: the fraction of the vector on which a group of `size` ranks at `level` works, as a function of
            (levels, level, size).
        times: how often the phase runs.
        by_all: whether all ranks of a host send to other hosts at the same time, or else one of them.
    """

    parameter: str
    collective: str
    is_inside: bool
    algorithms: tuple[str, ...]
    fraction: Callable[[Levels, int, int], float] = lambda levels, level, size: 1.0
    times: int = 1
    by_all: bool = False

    def cost(self, levels: Levels, names: Names) -> Cost | None:
        """Return the cost of the phase; None if one of the algorithms declares no cost.

        At each level the most expensive group of ranks counts, and the costs of the levels are added up.

        Raises:
            NoAlgorithmError, UsageError: as `algorithm_named` and `inner_names`.
        """
        inner = inner_names(self.collective, names, levels) if self.is_inside else (str(names),)
        of_levels = [self._cost_at(levels, level, name) for level, name in enumerate(inner, start=int(self.is_inside))]
        return total(self.times * of_levels)

    def _cost_at(self, levels: Levels, level: int, name: str) -> Cost | None:
        algorithm, params = algorithm_named(self.collective, name)
        fractions, costs = list[float](), list[Cost]()
        paths = list[float]()
        for size in levels.sizes[level]:
            if (cost := algorithm.cost_of(size, params)) is None:
                return None
            costs.append(cost)
            fractions.append(self.fraction(levels, level, size))
            paths += [] if cost.path is None or self.is_inside else [cost.path * fractions[-1]]
        return Cost(
            rounds=max(cost.rounds for cost in costs),
            sent=max(cost.sent * fraction for cost, fraction in zip(costs, fractions, strict=True)),
            reduced=max(cost.reduced * fraction for cost, fraction in zip(costs, fractions, strict=True)),
            path=max(paths, default=None),
        )


def total(costs: Iterable[Cost | None]) -> Cost | None:
    """Return the cost of phases that run one after the other; None if one of the costs is None."""
    declared, is_complete = list[Cost](), True
    for cost in costs:
        is_complete = is_complete and cost is not None
        declared += [] if cost is None else [cost]
    if not is_complete:
        return None
    paths = [cost.sent if cost.path is None else cost.path for cost in declared]
    return Cost(
        rounds=sum(cost.rounds for cost in declared),
        sent=sum(cost.sent for cost in declared),
        reduced=sum(cost.reduced for cost in declared),
        path=None if all(cost.path is None for cost in declared) else sum(paths),
    )


@record
class Composition(Algorithm):
    """An algorithm made of phases. Its builder takes `hosts` and, for each phase, the name of an algorithm.

    Attributes:
        phases: the phases in the order in which they run.
        levels: a function of (hosts, size) that returns the levels of hosts that the algorithm uses.
        between: the cost of the local work between the phases, which sends no messages, as a function of the levels.
        needs: a function of the levels that returns None if the algorithm can run on these hosts, or else the reason
            why it cannot.
    """

    cost: Callable[..., Cost] | None = field(init=False, compare=False, repr=False)
    phases: tuple[PhaseKind, ...] = ()
    levels: Callable[[Hosts | None, int], Levels] = levels_of
    between: Callable[[Levels], Cost] = lambda levels: Cost(rounds=0, sent=0, reduced=0)
    needs: Callable[[Levels], str | None] = lambda levels: None

    def __post_init__(self) -> None:
        object.__setattr__(self, "cost", lambda size, **params: self.cost_of(size, params))

    def cost_of(self, size: int, params: Mapping[str, Any]) -> Cost | None:
        """Return the sum of the costs of the phases; None if a phase declares no cost.

        The sum is an upper bound, because the busiest rank of one phase need not be the busiest rank of the next.
        """
        levels = self.levels(params.get("hosts"), size)
        names = {phase: params.get(phase.parameter, phase.algorithms[0]) for phase in self.phases}
        return total((self.between(levels), *(phase.cost(levels, names[phase]) for phase in self.phases)))


def algorithm_named(collective: str, name: str) -> tuple[Algorithm, Mapping[str, Any]]:
    """Return the algorithm of a phase, by a name such as "knomial(radix=3)", and the parameters for its builder.

    Raises:
        NoAlgorithmError: there is no such algorithm, or it is composed of phases itself.
        UsageError: the algorithm does not take these parameters.
    """
    algorithm_name, params = _parsed(name)
    algorithms = flat_algorithms_of(collective)
    if algorithm_name not in algorithms:
        raise NoAlgorithmError(f"no phase can be {collective} {name!r}: it can be {', '.join(algorithms)}")
    if reserved := ", ".join(param for param in params if param in _SET_BY_COMPOSITION):
        raise UsageError(f"no phase can be {collective} {name!r}: the composition itself sets {reserved}")
    algorithm = algorithms[algorithm_name]
    if params:
        try:
            algorithm.check_parameters(params)
        except UsageError as error:
            raise UsageError(f"no phase can be {collective} {name!r}: {error}") from None
    return algorithm, params


def _parsed(name: str) -> tuple[str, Mapping[str, Any]]:
    try:
        variant = parsed(name)
    except ValueError as error:
        raise UsageError(f"no phase can be {name!r}: name {error}") from None
    return variant.algorithm, dict(variant.params)


def inner_names(collective: str, names: Names, levels: Levels) -> tuple[str, ...]:
    """Return the name of the algorithm for each level inside the outermost hosts, the outer levels first.

    Raises:
        UsageError: the number of names is not the number of these levels.
    """
    inner = len(levels.sizes) - 1
    of_levels = (names,) * inner if isinstance(names, str) else names
    if len(of_levels) != inner:
        raise UsageError(
            f"{len(of_levels)} algorithms of {collective} are named for {inner} levels inside hosts: name one for all "
            "levels, or one for each level"
        )
    return of_levels
