"""Compositions as declared: algorithms of phases inside hosts and across them, and what the phases cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any, TypeAlias

from unisono.algorithms.catalogue.algorithm import Algorithm, Cost
from unisono.algorithms.catalogue.variants import parsed
from unisono.algorithms.composition.host_levels import Hosts, Levels, levels_of
from unisono.errors import NoAlgorithmError, UsageError
from unisono.records import record

# An algorithm with parameters of its builder or without, "knomial(radix=3)" or "ring", for all levels, or one for each
# level, from the outermost one that uses it.
Names: TypeAlias = str | tuple[str, ...]

# What a phase is told by the composition, not by its name.
_TOLD = ("size", "rank", "root", "varying", "hosts")


@record
class PhaseKind:
    """A phase that a composition declares.

    Attributes:
        parameter: the parameter of the builder that names its algorithms.
        collective: what they carry out.
        is_inside: whether it runs inside hosts, at each level, and not across them.
        algorithms: those that the tuner chooses among; the first one is the default.
        fraction: of the vector, what groups of `size` ranks at `level` work on: a function of (levels, level, size).
        times: how often it runs.
        by_all: whether all ranks of a host send to other hosts at once, and not one of them.
    """

    parameter: str
    collective: str
    is_inside: bool
    algorithms: tuple[str, ...]
    fraction: Callable[[Levels, int, int], float] = lambda levels, level, size: 1.0
    times: int = 1
    by_all: bool = False

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


@record
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


def algorithm_named(collective: str, name: str) -> tuple[Algorithm, Mapping[str, Any]]:
    """Return the algorithm that a phase names, and the parameters of its builder.

    Raises:
        NoAlgorithmError: there is no such algorithm, or it is composed of phases itself.
        UsageError: it does not take such parameters.
    """
    # The registry lists the compositions, which are made with this: it can be asked only when all of them are there.
    from unisono.algorithms.catalogue.registry import algorithms_of

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


def _parsed(name: str) -> tuple[str, Mapping[str, Any]]:
    try:
        found = parsed(name)
    except ValueError as error:
        raise UsageError(f"no phase can be {name!r}: name {error}") from None
    return found.algorithm, dict(found.params)


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
