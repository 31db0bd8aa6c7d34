"""Scores choices and predictions by measurements: regrets, errors of the model, and crossovers.

One half of the rounds determines the best variant and the other half scores everything, and then the other way round.
So luck does not count as speed. Regret is the time of the choice over that of the best; 1 is none, and less than 1 is
noise. `hindsight` shows the size of luck: the result of a choice by the same rounds that score it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, permutations
from statistics import geometric_mean, median
from typing import NamedTuple

import numpy as np
from rich.table import Table

from unisono.bench.statistics import usual_s

SELECTORS = ("table", "model", "thresholds", "rings")
HINDSIGHT = "hindsight"
# Two variants differ at a size if one is faster by the factor `_ALIKE` in at least this part of the rounds.
_ALIKE = 1.05
_SURELY = 0.75


class SizeTimes(NamedTuple):
    """All measurements at one size.

    Attributes:
        transport, collective, nbytes: the point.
        times_s: for each variant, the seconds of a call in each round.
        choices: the variant that each selector has chosen.
        predicted_s: the seconds that the model predicts, for the variants that it chooses among.
    """

    transport: str
    collective: str
    nbytes: int
    times_s: Mapping[str, Sequence[float]]
    choices: Mapping[str, str]
    predicted_s: Mapping[str, float]

    def halves(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the time of each variant by the even rounds, and by the odd ones."""
        even, odd = ({name: usual_s(times[first::2]) for name, times in self.times_s.items()} for first in (0, 1))
        return even, odd

    def regret(self, selector: str) -> float:
        """Return the time of the variant that the selector chose, over that of the fastest variant."""
        ratios = list[float]()
        for choosing, scoring in (self.halves(), self.halves()[::-1]):
            best = scoring[_least(choosing)]
            chosen = _least(scoring) if selector == HINDSIGHT else self.choices[selector]
            ratios.append(scoring[chosen] / best)
        return geometric_mean(ratios)

    def errors(self) -> list[float]:
        """Return the relative errors of the predictions."""
        return [
            abs(s / usual_s(self.times_s[name]) - 1) for name, s in self.predicted_s.items() if name in self.times_s
        ]


def _least(times_s: Mapping[str, float]) -> str:
    return min(times_s, key=times_s.__getitem__)


def rises(ratios: Sequence[tuple[float, float]], level: float = 1.0) -> list[float]:
    """Return the sizes at which a ratio rises to a level; `ratios` are (bytes, ratio) with ascending bytes.

    Between two sizes, the ratio is on a line on logarithmic axes.

    >>> rises([(1, 0.5), (16, 2.0), (32, 0.5)])
    [4.0]
    """
    logs = [(math.log(nbytes), math.log(ratio / level)) for nbytes, ratio in ratios]
    return [
        math.exp(low + (high - low) * below / (below - above))
        for (low, below), (high, above) in pairwise(logs)
        if below < 0 <= above
    ]


def crossovers(points: Iterable[SizeTimes]) -> list[float]:
    """Return, for each measured crossover, the factor by which the predicted one is off.

    The factor is at least 1. It is infinite if no crossover of the two variants in this direction is predicted.
    """
    curves = defaultdict[tuple[str, str], list[SizeTimes]](list)
    for point in points:
        curves[point.transport, point.collective].append(point)
    return [factor for curve in curves.values() for factor in _crossovers(sorted(curve, key=lambda each: each.nbytes))]


def _crossovers(points: Sequence[SizeTimes]) -> list[float]:
    variants = [set(point.predicted_s) & set(point.times_s) for point in points]
    factors = list[float]()
    for one, other in permutations(sorted(set.union(*variants)), 2):
        both = [point for point, names in zip(points, variants, strict=True) if {one, other} <= names]
        predicted = rises([(each.nbytes, each.predicted_s[one] / each.predicted_s[other]) for each in both])
        for low, high in _measured(both, one, other):
            factors.append(min((max(1.0, low / each, each / high) for each in predicted), default=math.inf))
    return factors


def _measured(points: Sequence[SizeTimes], one: str, other: str) -> Iterator[tuple[float, float]]:
    """Yield the ranges of sizes in which one variant, which is faster below, becomes slower than another."""
    surely = [_surely_slower(point, one, other) for point in points]
    decided = [number for number, sign in enumerate(surely) if sign]
    for first, last in pairwise(decided):
        if surely[first] < 0 < surely[last]:
            between = [
                (each.nbytes, usual_s(each.times_s[one]) / usual_s(each.times_s[other]))
                for each in points[first : last + 1]
            ]
            high = min(rises(between, _ALIKE), default=between[-1][0])
            low = max((each for each in rises(between, 1 / _ALIKE) if each <= high), default=between[0][0])
            yield low, high


def _surely_slower(point: SizeTimes, one: str, other: str) -> int:
    """Return 1 if one variant takes longer than another, -1 if it takes less time, and 0 if they do not differ."""
    pairs = list(zip(point.times_s[one], point.times_s[other], strict=True))
    longer = sum(a > _ALIKE * b for a, b in pairs) / len(pairs)
    shorter = sum(b > _ALIKE * a for a, b in pairs) / len(pairs)
    return int(longer >= _SURELY) - int(shorter >= _SURELY)


def summary(points: Sequence[SizeTimes]) -> dict[str, dict[str, float]]:
    """Return the regrets of each selector: geometric mean, 90th percentile, maximum, and the share within 5 %."""
    rows = {}
    for selector in (*SELECTORS, HINDSIGHT):
        regrets = [point.regret(selector) for point in points]
        rows[selector] = {
            "geomean": geometric_mean(regrets),
            "p90": float(np.quantile(regrets, 0.9)),
            "max": max(regrets),
            "within 5 %": sum(regret <= 1.05 for regret in regrets) / len(regrets),
        }
    return rows


def shown(title: str, points: Sequence[SizeTimes]) -> Table:
    """Return a table of the regrets of each selector, where regret is the time of the choice over that of the best."""
    table = Table(title=title)
    for heading in ("chosen by", "geometric mean", "p90", "max", "within 5 %"):
        table.add_column(heading, justify="left" if heading == "chosen by" else "right")
    for selector, row in summary(points).items():
        numbers = (f"{row['geomean']:.3f}", f"{row['p90']:.3f}", f"{row['max']:.3f}", f"{row['within 5 %']:.0%}")
        table.add_row(selector, *numbers)
    return table


def of_model(points: Sequence[SizeTimes]) -> str:
    """Return a sentence about the model: its median error, and the quality of its crossovers."""
    errors = [error for point in points for error in point.errors()]
    factors = crossovers(points)
    error = f"median error of the model {median(errors):.0%}" if errors else "the model predicts none of them"
    if not factors:
        return f"{error}; no crossovers"
    near, far = (sum(factor <= most for factor in factors) / len(factors) for most in (2, 4))
    return f"{error}; of {len(factors)} crossovers {near:.0%} predicted within 2×, {far:.0%} within 4×"
