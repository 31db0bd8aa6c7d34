"""Campaigns: find the fastest variant for each collective and size within a budget of seconds.

Theory of operation
-------------------
1. Sizes far apart (the *anchors*) come first. All candidates race there, except those that the model predicts to be far
   slower than the best. Most candidates leave a race after one block.
2. Parameters of the winners (segments, lanes, radix, window) are refined by coordinate descent.
3. At the sizes between anchors, times are predicted from those at the anchors. Only variants near the best race there,
   from at least two families of algorithms.
4. Where the winner changes between two sizes, bisection finds the size at which it does.

Each race may take its share of the remaining budget.

A campaign is pure: a `Trials` object runs the candidates. All ranks of a job go through the same campaign. They get the
same times, so they decide alike. One of them keeps the measurements.
"""

from __future__ import annotations

import inspect
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple, Protocol

from unisono.algorithms.catalogue.algorithm import Algorithm, Builder
from unisono.algorithms.catalogue.registration import registered
from unisono.algorithms.catalogue.registry import find
from unisono.algorithms.catalogue.variants import SEGMENT, Variant, parsed
from unisono.algorithms.composition.phases import Composition
from unisono.errors import UsageError
from unisono.tuning.decide.choice import Candidate, Question, TunerState, candidate, looked_at
from unisono.tuning.decide.model import segments, usual_segment_nbytes
from unisono.tuning.machine.parameters import between
from unisono.tuning.measure.measurement_log import Context, Measurement
from unisono.tuning.measure.race import Lap, Outcome, Rules, interval, quantile, race

# Candidates race if their time is at most this factor above the best: by the model where nothing has been measured, and
# by times measured at other sizes.
FAR_BEHIND = 2.0
NEAR = 1.3
FAMILIES = 2
# A changed parameter must save at least this part of the time, with confidence.
SAVED = 0.02
# Bisection stops when two sizes with different winners are at most this factor apart.
BRACKET = 2.0
# The part of the budget at which each stage ends at the latest.
_STAGES = {"anchors": 0.5, "refining": 0.6, "between": 0.95, "crossings": 1.0}
_LEAST_PATIENCE_S = 60.0
# How often a race is repeated if cores moved during it.
_ATTEMPTS = 4
_COORDINATES = {"radix": (2, 3, 4, 8), "lanes": (1, 2, 4), "window": (1, 2, 4, 8)}
_SEGMENTS = tuple(1 << power for power in range(14, 24))
_LEAST_SEGMENTED = 64 << 10


def patience_s(budget_s: float) -> float:
    """Return how many seconds a campaign with this budget waits for the requested placement of cores."""
    return max(_LEAST_PATIENCE_S, budget_s)


class PlacementWait(NamedTuple):
    """The result of waiting for a placement of the cores.

    Attributes:
        label: the placement; empty if it is not known.
        passed_s: seconds from the last run until the placement was first measured.
        waited_s: seconds of waiting after that.
    """

    label: str
    passed_s: float
    waited_s: float


class Trials(Protocol):
    """Runs candidates. All ranks get the same answers."""

    @property
    def known(self) -> TunerState:
        """The tuner's state on this machine."""

    def question(self, collective: str, nbytes: int) -> Question:
        """Return the question to the tuner about calls of `collective` with `nbytes`."""

    def nbytes(self, collective: str, nbytes: int) -> int:
        """Return the possible size nearest to `nbytes`."""

    def prepare(self, collective: str, nbytes: int, variant: str) -> str | None:
        """Prepare calls of `variant` for `run`; return None, or the reason why they cannot run."""

    def run(self, collective: str, nbytes: int, variant: str) -> tuple[list[float], float]:
        """Run prepared calls; return the seconds of each call, and the seconds that have passed since the last run."""

    def await_placement(self, required: str, most_s: float) -> PlacementWait:
        """Wait until the cores have the placement `required`, but for at most `most_s`."""


class Settings(NamedTuple):
    """The settings of a campaign.

    Attributes:
        collectives: by name, the most important ones first.
        sizes: bytes of the vector, ascending.
        budget_s: seconds in all, without those of waiting for a placement.
        about: fields of every measurement: machine, job, library, date, load.
        seed: the seed of the order within blocks.
        placement: the placement that the cores must have all through a race for it to count, or "any".
        again: contexts and bytes that are measured again even if there are earlier measurements.
    """

    collectives: Sequence[str]
    sizes: Sequence[int]
    budget_s: float
    about: Mapping[str, Any]
    seed: int = 0
    placement: str = "any"
    again: frozenset[tuple[Context, int]] = frozenset()


class Campaign:
    """One campaign, run once.

    Args:
        trials: runs the candidates.
        settings: what to measure.
        keep: called with the new measurements after each race.
        observe: called after each race with a text and the part of the budget that is spent.
        before: measurements of earlier campaigns. Points that they have with the same placement are not measured again.
    """

    def __init__(
        self,
        trials: Trials,
        settings: Settings,
        keep: Callable[[Sequence[Measurement]], None],
        observe: Callable[[str, float], None],
        before: Iterable[Measurement] = (),
    ) -> None:
        self._trials = trials
        self._settings = settings
        self._keep = keep
        self._observe = observe
        self._draw = random.Random(settings.seed)
        self._spent_s = self._waited_s = 0.0
        self._races = 0
        self._most_blocks = 0
        # Times by collective, size and variant.
        self._times: defaultdict[str, defaultdict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
        for measurement in before:
            point = (measurement.context, measurement.nbytes)
            counts = settings.placement in {"any", measurement.placement} and point not in settings.again
            collective = measurement.context.collective
            if counts and measurement.context == self._context(collective):
                self._times[collective][measurement.nbytes][measurement.variant] = measurement.median_s

    def run(self) -> list[tuple[str, int]]:
        """Measure until all points are done or the budget is spent; return the collectives and bytes that are missing.

        Raises:
            UsageError: nothing can be measured, or the budget is too small for the first race.
        """
        sizes = {name: self._sizes(name) for name in self._settings.collectives}
        anchors = {
            name: [each for k, each in enumerate(of_name) if k % 3 == 0 or each == of_name[-1]]
            for name, of_name in sizes.items()
        }
        self._visit("anchors", [(name, nbytes) for name, of_name in anchors.items() for nbytes in of_name])
        if self._spent_s > self._settings.budget_s and self._races and self._most_blocks < 2:
            raise UsageError(
                f"a budget of {self._settings.budget_s:g} s is too small to measure anything: the first measurement "
                f"alone took {self._spent_s:.3g} s; give more, or fewer and shorter sizes"
            )
        self._refine([(name, nbytes) for name, of_name in anchors.items() for nbytes in reversed(of_name)])
        between_ = [(name, n) for name, of_name in sizes.items() for n in of_name if n not in anchors[name]]
        self._visit("between", between_)
        self._bisect()
        return [(name, n) for name, of_name in sizes.items() for n in of_name if n not in self._times[name]]

    def _sizes(self, collective: str) -> list[int]:
        context = self._context(collective)
        again = {nbytes for where, nbytes in self._settings.again if where == context}
        return sorted({*again, *(self._trials.nbytes(collective, nbytes) for nbytes in self._settings.sizes)})

    def _context(self, collective: str) -> Context:
        question = self._trials.question(collective, self._trials.nbytes(collective, 1))
        machine = self._settings.about.get("machine", "")
        return Context(machine, collective, question.link, question.dtype, question.size, question.ranks_per_host)

    # Stages.

    def _visit(self, stage: str, points: Sequence[tuple[str, int]]) -> None:
        """Race the candidates at each of the points that have not been measured."""
        missing = [point for point in points if len(self._times[point[0]].get(point[1], {})) < FAMILIES]
        for number, (collective, nbytes) in enumerate(missing):
            budget_s = self._remaining_s(stage) / (len(missing) - number)
            if budget_s <= 0 and self._races:
                return
            self._race(collective, nbytes, self._candidates(collective, nbytes), budget_s)

    def _refine(self, points: Sequence[tuple[str, int]]) -> None:
        """Search better parameters for the winners, one parameter after the other."""
        for number, (collective, nbytes) in enumerate(points):
            if nbytes not in self._times[collective]:
                continue
            best = self._best(collective, nbytes)
            for parameter, values in self._coordinates(collective, nbytes, best):
                share_s = self._remaining_s("refining") / (len(points) - number)
                if share_s <= 0:
                    return
                best = self._descend(collective, nbytes, best, parameter, values, share_s)

    def _descend(
        self, collective: str, nbytes: int, best: Variant, parameter: str, values: Sequence[int], budget_s: float
    ) -> Variant:
        """Return the best variant along one parameter: keep going in a direction as long as it saves time."""
        place = values.index(self._value(collective, nbytes, best, parameter))
        for step in (1, -1):
            at = place + step
            while 0 <= at < len(values) and budget_s > 0:
                other = best.having(**{parameter: values[at]})
                raced = self._raced(collective, nbytes, [str(best), str(other)], budget_s)
                if raced is None:
                    break
                outcome, placement = raced
                # An unsure gain is discarded, because among many values one would look best by luck.
                if not _is_worth_it(outcome, str(other)):
                    break
                self._note(collective, nbytes, outcome, placement)
                best, at, budget_s = other, at + step, budget_s - outcome.cost_s
        return best

    def _bisect(self) -> None:
        """Search the sizes at which winners change, wherever two neighbouring sizes are far apart."""
        again = True
        while again and self._remaining_s("crossings") > 0:
            again = False
            for collective in self._settings.collectives:
                for low, high in pairwise(sorted(self._times[collective])):
                    middle = self._trials.nbytes(collective, round((max(1, low) * high) ** 0.5))
                    winners = {self._best(collective, low), self._best(collective, high)}
                    if high <= BRACKET * max(1, low) or len(winners) == 1 or middle in (low, high):
                        continue
                    if (remaining_s := self._remaining_s("crossings")) <= 0:
                        return
                    again |= self._race(collective, middle, self._candidates(collective, middle), remaining_s / 2)

    # Candidates.

    def _candidates(self, collective: str, nbytes: int) -> list[str]:
        """Return the variants to race at a size: by times at the sizes around it, or else by the model."""
        measured = sorted(n for n, times in self._times[collective].items() if n != nbytes and len(times) > 1)
        below = [n for n in measured if n < nbytes][-1:]
        above = [n for n in measured if n > nbytes][:1]
        rows = open_candidates(self._trials.question(collective, nbytes), self._trials.known)
        predicted = {each.variant: each.predicted_s for each in rows if each.predicted_s is not None}
        unpredicted = {each.variant for each in rows} - set(predicted)
        if not (below and above):
            return self._kept(collective, nbytes, predicted, FAR_BEHIND, unpredicted)
        low, high = self._times[collective][below[0]], self._times[collective][above[0]]
        times = {v: between(nbytes, (below[0], low[v]), (above[0], high[v])) for v in low if v in high}
        # A variant that was not measured on one side is taken to be off from the model by the usual factor.
        if factors := [times[variant] / predicted[variant] for variant in times if variant in predicted]:
            times = {variant: median(factors) * s for variant, s in predicted.items()} | times
        required = {str(self._best(collective, n)) for n in (below[0], above[0])}
        # A library may change its algorithm anywhere between the two sizes.
        required |= {each for each in unpredicted & set(times) if times[each] <= FAR_BEHIND * min(times.values())}
        return self._kept(collective, nbytes, times, NEAR, required)

    def _kept(
        self, collective: str, nbytes: int, times: Mapping[str, float], most: float, required: set[str]
    ) -> list[str]:
        """Return the variants within `most` times the best, those `required`, and the best of at least two families.

        All of them can run. Algorithms that the user has registered, whose costs nobody has measured, are required.
        They and required variants without a time come second, before the budget of their race ends. Of other variants
        with equal predictions, because their closed forms are equal, one comes before any second one.
        """
        own = [each.name for each in registered() if each.collective == collective and each.name in times]
        others = {variant: time_s for variant, time_s in times.items() if variant not in own}
        ordered = sorted(others, key=others.__getitem__)
        kept, families = list[str](), set[str]()
        for variant in (*ordered[:1], *own, *sorted(required - set(times)), *ordered[1:]):
            family = self._family(collective, variant)
            is_near = variant in own or variant in required or times[variant] <= most * times[ordered[0]]
            is_other = len(families) < FAMILIES and family not in families
            if (is_near or is_other) and self._trials.prepare(collective, nbytes, variant) is None:
                kept.append(variant)
                families.add(family)
        return _one_of_each_first(kept, others)

    @staticmethod
    def _family(collective: str, variant: str) -> str:
        """Return the family of an algorithm: the file of its builder, which holds algorithms of one idea."""
        build = find(collective, parsed(variant).algorithm).build
        return build.file if isinstance(build, Builder) else variant

    def _coordinates(self, collective: str, nbytes: int, best: Variant) -> list[tuple[str, Sequence[int]]]:
        """Return the parameters of a variant that can be refined, each with its possible values."""
        algorithm = find(collective, best.algorithm)
        # Values beyond the number of ranks have the same effect as that number.
        ranks = self._trials.question(collective, nbytes).size
        values_of: dict[str, Sequence[int]] = {
            name: [value for value in _COORDINATES[name] if value < ranks]
            for name in algorithm.parameters()
            if name in _COORDINATES
        }
        if nbytes >= _LEAST_SEGMENTED and not isinstance(algorithm, Composition):
            cost = algorithm.cost_of(ranks, dict(best.params))
            values_of[SEGMENT] = [size for size in _SEGMENTS if segments(algorithm, cost, nbytes, size) > 1]
        return [
            (name, sorted({*values, self._value(collective, nbytes, best, name)})) for name, values in values_of.items()
        ]

    def _value(self, collective: str, nbytes: int, variant: Variant, parameter: str) -> int:
        """Return the value of a parameter of a variant, or its default."""
        value = dict(variant.params).get(parameter)
        if value is not None:
            return int(value)
        if parameter == SEGMENT:
            return self._usual_segment_nbytes(collective, nbytes, variant)
        default = inspect.signature(find(collective, variant.algorithm).build).parameters[parameter].default
        return int(default) if isinstance(default, int) else 1

    def _usual_segment_nbytes(self, collective: str, nbytes: int, variant: Variant) -> int:
        question, algorithm = self._trials.question(collective, nbytes), find(collective, variant.algorithm)
        cost = algorithm.cost_of(question.size, dict(variant.params))
        return usual_segment_nbytes(algorithm, cost, nbytes, self._trials.known.parameters.link(question.link))

    # Races.

    def _best(self, collective: str, nbytes: int) -> Variant:
        times = self._times[collective][nbytes]
        return parsed(min(times, key=times.__getitem__))

    def _remaining_s(self, stage: str) -> float:
        return _STAGES[stage] * self._settings.budget_s - self._spent_s

    def _race(self, collective: str, nbytes: int, variants: Sequence[str], budget_s: float) -> bool:
        """Race variants at a size and keep the measurements; return whether a race counted."""
        raced = self._raced(collective, nbytes, variants, budget_s)
        if raced is not None:
            self._note(collective, nbytes, *raced)
        return raced is not None

    def _raced(
        self, collective: str, nbytes: int, variants: Sequence[str], budget_s: float
    ) -> tuple[Outcome, str] | None:
        """Return the outcome and the placement of a race; None if no variant can run, or the cores moved each time."""
        able = [each for each in dict.fromkeys(variants) if self._trials.prepare(collective, nbytes, each) is None]
        if not able:
            return None
        for _ in range(_ATTEMPTS):
            placement = self._await_placement()
            if placement is None:
                return None
            outcome = race(
                able, lambda each: self._trials.run(collective, nbytes, each), Rules(budget_s=budget_s), self._draw
            )
            self._spent_s += outcome.cost_s
            if not self._has_moved():
                self._races += 1
                self._most_blocks = max(self._most_blocks, *(len(lap.times_s) for lap in outcome.laps))
                part = min(1.0, self._spent_s / self._settings.budget_s)
                self._observe(f"{collective}, {nbytes} B: {outcome.winner}", part)
                return outcome, placement
        return None

    def _await_placement(self) -> str | None:
        """Wait until the cores have the requested placement; return the placement, or None after too long a wait.

        All waits together may take `patience_s`, which does not count against the budget.

        Raises:
            UsageError: the wait took too long, and no race has run yet.
        """
        required, most_s = self._settings.placement, patience_s(self._settings.budget_s)
        label = self._placed(required, most_s - self._waited_s)
        if required in {"any", label}:
            return label
        if not self._races:
            how_long = f"in {most_s:g} s of waiting" if label else "because there are not two of them"
            raise UsageError(f"the cores were not {required} during a whole measurement, {how_long}")
        return None

    def _has_moved(self) -> bool:
        """Return whether the cores have lost the requested placement."""
        required = self._settings.placement
        return required != "any" and self._placed("any", 0.0) != required

    def _placed(self, required: str, most_s: float) -> str:
        """Wait up to `most_s` for the required placement, and return the placement that the cores have then.

        The time counts as spent, and the waiting also as waited, because waits have a limit of their own.
        """
        placed = self._trials.await_placement(required, most_s)
        self._spent_s += placed.passed_s
        self._waited_s += placed.waited_s
        return placed.label

    def _note(self, collective: str, nbytes: int, outcome: Outcome, placement: str) -> None:
        """Record the times of new variants at a size, scaled to the earlier times by a variant that has both."""
        times, context = self._times[collective][nbytes], self._context(collective)
        again = [lap for lap in outcome.laps if lap.candidate in times]
        factor = times[again[0].candidate] / again[0].median_s if again else 1.0
        laps = [
            lap._replace(times_s=tuple(factor * each for each in lap.times_s))
            for lap in outcome.laps
            if lap.candidate not in times
        ]
        times |= {lap.candidate: lap.median_s for lap in laps}
        about = {**self._settings.about, "placement": placement}
        self._keep([measured(context, lap, nbytes, about) for lap in laps])


def is_unmeasured(algorithm: Algorithm, is_one_host: bool) -> bool:
    """Return whether an algorithm is not measured, because its only gain are short ways, and all ranks are on a host.

    There all ways are equal, so it cannot win.
    """
    return algorithm.short_ways and is_one_host


def open_candidates(question: Question, state: TunerState) -> list[Candidate]:
    """Return the algorithms that can run, including those that the tuner uses only if named, and libraries' own.

    Those that are not measured on one host (`is_unmeasured`) are not among them.
    """
    is_one_host = question.ranks_per_host >= question.size
    rows = [
        # Compositions are not named, so that those without any gain stay out.
        candidate(Variant(algorithm.name), question, state, None, not isinstance(algorithm, Composition))
        for algorithm in looked_at(question)
        if not is_unmeasured(algorithm, is_one_host)
    ]
    return [each for each in rows if each.refusal is None]


def _one_of_each_first(variants: Sequence[str], times: Mapping[str, float]) -> list[str]:
    """Return variants in their order, but of several with equal times, one before any second one.

    >>> _one_of_each_first(["direct", "doubling", "ring", "own"], {"direct": 1.0, "doubling": 1.0, "ring": 2.0})
    ['direct', 'ring', 'own', 'doubling']
    """
    seen = Counter[float | str]()
    positions = list[int]()
    for variant in variants:
        alike = times.get(variant, variant)
        positions.append(seen[alike])
        seen[alike] += 1
    return [each for _, each in sorted(zip(positions, variants, strict=True), key=itemgetter(0))]


def _is_worth_it(outcome: Outcome, variant: str) -> bool:
    """Return whether a race of two shows with confidence that `variant` saves enough; False if it ended too early."""
    if outcome.winner != variant:
        return False
    (own_s,) = [lap.median_s for lap in outcome.laps if lap.candidate == variant]
    (other,) = [lap for lap in outcome.laps if lap.candidate != variant]
    is_sure = other.dropped or len(other.times_s) >= Rules().fewest
    return is_sure and own_s <= (1 - SAVED) * interval(other.times_s)[0]


def measured(context: Context, lap: Lap, nbytes: int, about: Mapping[str, Any]) -> Measurement:
    """Return the measurement of one candidate in a race."""
    low_s, high_s = interval(lap.times_s)
    p10_s, p90_s = quantile(lap.times_s, 0.1), quantile(lap.times_s, 0.9)
    fields = {name: value for name, value in about.items() if name != "machine"}
    return Measurement(
        context, lap.candidate, nbytes, lap.median_s, low_s, high_s, p10_s, p90_s, len(lap.times_s), **fields
    )
