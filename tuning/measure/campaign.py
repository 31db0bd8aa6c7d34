"""Campaigns: which variant is fastest for each collective and size, found within a budget of seconds.

Theory of operation. Sizes far apart (the *anchors*) come first, with all candidates that the model does not put far
behind; most leave after a block. At the sizes between, times are predicted from those measured at the anchors, and only
those near the best are raced, at least two families of algorithms. Then parameters of winners (segments, lanes, radix,
window) are refined by coordinate descent, and where winners change, the size at which they do is looked for by
bisection. Each race may take its share of what is left of the budget.

A campaign is pure: `Trials` run the candidates. All ranks of a job go through the same campaign, and as they are told
the same times, they decide alike; one of them keeps the measurements.
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

from unisono.algorithms.catalogue.algorithm import Builder
from unisono.algorithms.catalogue.registry import find
from unisono.algorithms.catalogue.variants import SEGMENT, Variant, parsed
from unisono.algorithms.composition.phases import Composition
from unisono.errors import UsageError
from unisono.tuning.decide.choice import Candidate, Question, TunerState, candidate, looked_at
from unisono.tuning.decide.model import segments, usual_segment_nbytes
from unisono.tuning.machine.parameters import between
from unisono.tuning.measure.measurement_log import Context, Measurement
from unisono.tuning.measure.race import Lap, Outcome, Rules, interval, quantile, race

# Candidates that are raced: how many times as long as the best they may be predicted to take, by the model where
# nothing has been measured, and by times measured at other sizes.
FAR_BEHIND = 2.0
NEAR = 1.3
FAMILIES = 2
# How much of its time a parameter must surely save to be changed.
SAVED = 0.02
# Two sizes between which the winner changes are near enough to each other.
BRACKET = 2.0
# Parts of the budget after which a stage ends, if it has not before.
_STAGES = {"anchors": 0.5, "refining": 0.6, "between": 0.95, "crossings": 1.0}
_LEAST_PATIENCE_S = 60.0
# How often a race is run in which the cores should not move, until they have not.
_ATTEMPTS = 4
_COORDINATES = {"radix": (2, 3, 4, 8), "lanes": (1, 2, 4), "window": (1, 2, 4, 8)}
_SEGMENTS = tuple(1 << power for power in range(14, 24))
_LEAST_SEGMENTED = 64 << 10


def patience_s(budget_s: float) -> float:
    """Return how many seconds a campaign within a budget waits for cores to be as far apart as is wanted."""
    return max(_LEAST_PATIENCE_S, budget_s)


class Placed(NamedTuple):
    """How far apart cores are.

    Attributes:
        label: how far, nothing if that is not known.
        passed_s: seconds from the last run until they had been looked at.
        waited_s: seconds of waiting from then on.
    """

    label: str
    passed_s: float
    waited_s: float


class Trials(Protocol):
    """What runs candidates; all ranks are given the same answers."""

    @property
    def known(self) -> TunerState:
        """What is known of the machine."""

    def question(self, collective: str, nbytes: int) -> Question:
        """Return what is asked about such calls."""

    def nbytes(self, collective: str, nbytes: int) -> int:
        """Return the size nearest to `nbytes` that there can be."""

    def prepare(self, collective: str, nbytes: int, variant: str) -> str | None:
        """Let such calls be run; return None, or why they cannot be."""

    def run(self, collective: str, nbytes: int, variant: str) -> tuple[list[float], float]:
        """Run prepared calls; return the seconds of each, and the seconds that have passed since the last run."""

    def await_placement(self, wanted: str, most_s: float) -> Placed:
        """Wait until cores are as far apart as `wanted`, or for so many seconds."""


class Settings(NamedTuple):
    """What to measure.

    Attributes:
        collectives: by name, the most wanted ones first.
        sizes: bytes of the vector, ascending.
        budget_s: seconds in all, without those of waiting for a placement.
        about: what measurements say of themselves: machine, job, library, date, load.
        seed: of the order in blocks.
        placement: how far apart cores have to be all through a race that counts, or "any".
        again: contexts and bytes that are measured again, whatever earlier measurements say.
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
        trials: what runs candidates.
        settings: what to measure.
        keep: is given what was measured, after each race.
        observe: is told what is done and which part of the budget is spent, after each race.
        before: measurements of earlier campaigns: what was measured then, as far apart as now, is not measured again.
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
        for each in before:
            counts = settings.placement in {"any", each.placement} and (each.context, each.nbytes) not in settings.again
            if counts and each.context == self._context(each.context.collective):
                self._times[each.context.collective][each.nbytes][each.variant] = each.median_s

    def run(self) -> list[tuple[str, int]]:
        """Measure until everything is or the budget is spent; return the collectives and bytes that are left out.

        Raises:
            UsageError: there is nothing to measure, or the budget was too small for it.
        """
        sizes = {name: self._sizes(name) for name in self._settings.collectives}
        anchors = {
            name: [each for k, each in enumerate(found) if k % 3 == 0 or each == found[-1]]
            for name, found in sizes.items()
        }
        self._visit("anchors", [(name, nbytes) for name, found in anchors.items() for nbytes in found])
        if self._spent_s > self._settings.budget_s and self._races and self._most_blocks < 2:
            raise UsageError(
                f"a budget of {self._settings.budget_s:g} s is too small to measure anything: the first race alone "
                f"took {self._spent_s:.3g} s; give more, or fewer and shorter sizes"
            )
        self._refine([(name, nbytes) for name, found in anchors.items() for nbytes in reversed(found)])
        between_ = [(name, n) for name, found in sizes.items() for n in found if n not in anchors[name]]
        self._visit("between", between_)
        self._bisect()
        return [(name, n) for name, found in sizes.items() for n in found if n not in self._times[name]]

    def _sizes(self, collective: str) -> list[int]:
        context = self._context(collective)
        again = {nbytes for where, nbytes in self._settings.again if where == context}
        return sorted({*again, *(self._trials.nbytes(collective, nbytes) for nbytes in self._settings.sizes)})

    def _context(self, collective: str) -> Context:
        asked = self._trials.question(collective, self._trials.nbytes(collective, 1))
        machine = self._settings.about.get("machine", "")
        return Context(machine, collective, asked.link, asked.dtype, asked.size, asked.ranks_per_host)

    # Stages.

    def _visit(self, stage: str, points: Sequence[tuple[str, int]]) -> None:
        """Race the candidates at each of the points at which nothing has been measured."""
        left = [point for point in points if len(self._times[point[0]].get(point[1], {})) < FAMILIES]
        for number, (collective, nbytes) in enumerate(left):
            budget_s = self._left_s(stage) / (len(left) - number)
            if budget_s <= 0 and self._races:
                return
            self._race(collective, nbytes, self._candidates(collective, nbytes), budget_s)

    def _refine(self, points: Sequence[tuple[str, int]]) -> None:
        """Look for better parameters of the winners, one parameter after the other."""
        for number, (collective, nbytes) in enumerate(points):
            if nbytes not in self._times[collective]:
                continue
            best = self._best(collective, nbytes)
            for parameter, values in self._coordinates(collective, nbytes, best):
                share_s = self._left_s("refining") / (len(points) - number)
                if share_s <= 0:
                    return
                best = self._descend(collective, nbytes, best, parameter, values, share_s)

    def _descend(
        self, collective: str, nbytes: int, best: Variant, parameter: str, values: Sequence[int], budget_s: float
    ) -> Variant:
        """Return the best variant along one parameter, going on in a direction as long as it pays."""
        place = values.index(self._value(collective, nbytes, best, parameter))
        for step in (1, -1):
            at = place + step
            while 0 <= at < len(values) and budget_s > 0:
                other = best.having(**{parameter: values[at]})
                raced = self._raced(collective, nbytes, [str(best), str(other)], budget_s)
                if raced is None:
                    break
                found, placement = raced
                # What is not surely better is not kept: of many values, one would be the best of them by luck.
                if not _is_worth_it(found, str(other)):
                    break
                self._note(collective, nbytes, found, placement)
                best, at, budget_s = other, at + step, budget_s - found.cost_s
        return best

    def _bisect(self) -> None:
        """Look for the sizes at which winners change, where two neighbours are far apart."""
        again = True
        while again and self._left_s("crossings") > 0:
            again = False
            for collective in self._settings.collectives:
                for low, high in pairwise(sorted(self._times[collective])):
                    middle = self._trials.nbytes(collective, round((max(1, low) * high) ** 0.5))
                    winners = {self._best(collective, low), self._best(collective, high)}
                    if high <= BRACKET * max(1, low) or len(winners) == 1 or middle in (low, high):
                        continue
                    if (left_s := self._left_s("crossings")) <= 0:
                        return
                    again |= self._race(collective, middle, self._candidates(collective, middle), left_s / 2)

    # Candidates.

    def _candidates(self, collective: str, nbytes: int) -> list[str]:
        """Return the variants to race at a size: by times at the sizes around it, or else by the model."""
        known = sorted(n for n, times in self._times[collective].items() if n != nbytes and len(times) > 1)
        below = [n for n in known if n < nbytes][-1:]
        above = [n for n in known if n > nbytes][:1]
        rows = self._open(collective, nbytes)
        predicted = {each.variant: each.predicted_s for each in rows if each.predicted_s is not None}
        unpredicted = {each.variant for each in rows} - set(predicted)
        if not (below and above):
            return self._kept(collective, nbytes, predicted, FAR_BEHIND, unpredicted)
        low, high = self._times[collective][below[0]], self._times[collective][above[0]]
        times = {v: between(nbytes, (below[0], low[v]), (above[0], high[v])) for v in low if v in high}
        # What was left out on one side is as much slower than the model says as the others are.
        if factors := [times[variant] / predicted[variant] for variant in times if variant in predicted]:
            times = {variant: median(factors) * s for variant, s in predicted.items()} | times
        wanted = {str(self._best(collective, n)) for n in (below[0], above[0])}
        # What a library does by itself may change anywhere between the two.
        wanted |= {each for each in unpredicted & set(times) if times[each] <= FAR_BEHIND * min(times.values())}
        return self._kept(collective, nbytes, times, NEAR, wanted)

    def _open(self, collective: str, nbytes: int) -> list[Candidate]:
        """Return the algorithms that can run, those that the tuner leaves to who names them too, and libraries' own."""
        asked, known = self._trials.question(collective, nbytes), self._trials.known
        rows = list[Candidate]()
        for algorithm in looked_at(asked):
            is_named = not isinstance(algorithm, Composition)  # Compositions that have nothing to gain stay out.
            rows.append(candidate(Variant(algorithm.name), asked, known, None, is_named))
        return [each for each in rows if each.refusal is None]

    def _kept(
        self, collective: str, nbytes: int, times: Mapping[str, float], most: float, wanted: set[str]
    ) -> list[str]:
        """Return the variants within `most` times the best, those `wanted`, and the best of at least two families.

        All of them can be run. Those of which nothing is known come second, before the budget of their race ends; and
        of those that are predicted alike, as they have the same closed form, one comes before any second one.
        """
        ordered = sorted(times, key=times.__getitem__)
        kept, families = list[str](), set[str]()
        for each in (*ordered[:1], *sorted(wanted - set(times)), *ordered[1:]):
            family = self._family(collective, each)
            is_near = each in wanted or times[each] <= most * times[ordered[0]]
            is_other = len(families) < FAMILIES and family not in families
            if (is_near or is_other) and self._trials.prepare(collective, nbytes, each) is None:
                kept.append(each)
                families.add(family)
        return _one_of_each_first(kept, times)

    @staticmethod
    def _family(collective: str, variant: str) -> str:
        """Return what algorithms of one idea have in common: the file of their builders."""
        build = find(collective, parsed(variant).algorithm).build
        return build.file if isinstance(build, Builder) else variant

    def _coordinates(self, collective: str, nbytes: int, best: Variant) -> list[tuple[str, Sequence[int]]]:
        """Return the parameters of a variant that can be refined, and their values, its own among them."""
        algorithm = find(collective, best.algorithm)
        # More than the ranks there are is as much as all of them.
        ranks = self._trials.question(collective, nbytes).size
        found: dict[str, Sequence[int]] = {
            name: [value for value in _COORDINATES[name] if value < ranks]
            for name in algorithm.parameters()
            if name in _COORDINATES
        }
        if nbytes >= _LEAST_SEGMENTED and not isinstance(algorithm, Composition):
            cost = algorithm.cost_of(ranks, dict(best.params))
            found[SEGMENT] = [size for size in _SEGMENTS if segments(algorithm, cost, nbytes, size) > 1]
        return [
            (name, sorted({*values, self._value(collective, nbytes, best, name)})) for name, values in found.items()
        ]

    def _value(self, collective: str, nbytes: int, variant: Variant, parameter: str) -> int:
        """Return the value of a parameter of a variant, which may be the default."""
        given = dict(variant.params).get(parameter)
        if given is not None:
            return int(given)
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

    def _left_s(self, stage: str) -> float:
        return _STAGES[stage] * self._settings.budget_s - self._spent_s

    def _race(self, collective: str, nbytes: int, variants: Sequence[str], budget_s: float) -> bool:
        """Race variants at a size and keep what was measured; return whether there was a race that counts."""
        raced = self._raced(collective, nbytes, variants, budget_s)
        if raced is not None:
            self._note(collective, nbytes, *raced)
        return raced is not None

    def _raced(
        self, collective: str, nbytes: int, variants: Sequence[str], budget_s: float
    ) -> tuple[Outcome, str] | None:
        """Return the outcome of a race, and how far apart the cores were; None if none can run, or the cores moved."""
        able = [each for each in dict.fromkeys(variants) if self._trials.prepare(collective, nbytes, each) is None]
        if not able:
            return None
        for _ in range(_ATTEMPTS):
            placement = self._await_placement()
            if placement is None:
                return None
            found = race(
                able, lambda each: self._trials.run(collective, nbytes, each), Rules(budget_s=budget_s), self._draw
            )
            self._spent_s += found.cost_s
            if not self._has_moved():
                self._races += 1
                self._most_blocks = max(self._most_blocks, *(len(lap.times_s) for lap in found.laps))
                part = min(1.0, self._spent_s / self._settings.budget_s)
                self._observe(f"{collective}, {nbytes} B: {found.winner}", part)
                return found, placement
        return None

    def _await_placement(self) -> str | None:
        """Wait until the cores are as far apart as is wanted; return how far, or None if they are not for too long.

        All waiting may take as long as `patience_s` says, and is not of the budget.

        Raises:
            UsageError: they are not for too long, and nothing has been raced.
        """
        wanted, most_s = self._settings.placement, patience_s(self._settings.budget_s)
        label = self._placed(wanted, most_s - self._waited_s)
        if wanted in {"any", label}:
            return label
        if not self._races:
            how_long = f"in {most_s:g} s of waiting" if label else "as there are not two of them"
            raise UsageError(f"the cores were not {wanted} for a race, {how_long}")
        return None

    def _has_moved(self) -> bool:
        """Return whether the cores are not as far apart as is wanted any more."""
        wanted = self._settings.placement
        return wanted != "any" and self._placed("any", 0.0) != wanted

    def _placed(self, wanted: str, most_s: float) -> str:
        """Return how far apart cores are, after waiting so long for them to be as is wanted, and take note of it."""
        found = self._trials.await_placement(wanted, most_s)
        self._spent_s += found.passed_s
        self._waited_s += found.waited_s
        return found.label

    def _note(self, collective: str, nbytes: int, found: Outcome, placement: str) -> None:
        """Keep the times of the variants that had none at this size, as they compare with one that had."""
        times, context = self._times[collective][nbytes], self._context(collective)
        again = [lap for lap in found.laps if lap.candidate in times]
        factor = times[again[0].candidate] / again[0].median_s if again else 1.0
        laps = [
            lap._replace(times_s=tuple(factor * each for each in lap.times_s))
            for lap in found.laps
            if lap.candidate not in times
        ]
        times |= {lap.candidate: lap.median_s for lap in laps}
        about = {**self._settings.about, "placement": placement}
        self._keep([measured(context, lap, nbytes, about) for lap in laps])


def _one_of_each_first(variants: Sequence[str], times: Mapping[str, float]) -> list[str]:
    """Return variants in their order, but one of all that take equally long before any second one.

    >>> _one_of_each_first(["direct", "doubling", "ring", "own"], {"direct": 1.0, "doubling": 1.0, "ring": 2.0})
    ['direct', 'ring', 'own', 'doubling']
    """
    seen = Counter[float | str]()
    turns = list[int]()
    for each in variants:
        alike = times.get(each, each)
        turns.append(seen[alike])
        seen[alike] += 1
    return [each for _, each in sorted(zip(turns, variants, strict=True), key=itemgetter(0))]


def _is_worth_it(found: Outcome, variant: str) -> bool:
    """Return whether a race of two, unless its budget ended it early, has found that `variant` surely saves enough."""
    if found.winner != variant:
        return False
    (own_s,) = [lap.median_s for lap in found.laps if lap.candidate == variant]
    (other,) = [lap for lap in found.laps if lap.candidate != variant]
    is_sure = other.dropped or len(other.times_s) >= Rules().fewest
    return is_sure and own_s <= (1 - SAVED) * interval(other.times_s)[0]


def measured(context: Context, lap: Lap, nbytes: int, about: Mapping[str, Any]) -> Measurement:
    """Return the measurement that a lap of a race is."""
    low_s, high_s = interval(lap.times_s)
    p10_s, p90_s = quantile(lap.times_s, 0.1), quantile(lap.times_s, 0.9)
    own = {name: value for name, value in about.items() if name != "machine"}
    return Measurement(
        context, lap.candidate, nbytes, lap.median_s, low_s, high_s, p10_s, p90_s, len(lap.times_s), **own
    )
