"""Choosing among algorithms that were measured, at numbers of ranks and of bytes that were not.

Theory of operation
-------------------
Measurements come in *rounds*: all that was measured of one call (collective, ranks, bytes) in one job. The same point
in another job may be half as fast, but what it is compared with is then slower by about as much. So the logarithm of a
time is taken to be what the algorithm is there, plus what the round is; and only the former decides.

`Interpolation` knows nothing of algorithms. Near the point that is asked for, the logarithm of each algorithm's time is
a plane over the logarithms of ranks and of bytes; rounds count the less, the further away they are, and also where the
number of ranks is a power of two and the point's is not, or where hosts have more ranks. All planes and all rounds are
found together, by least squares.

`Steps` is a model of the kind of PLogP: an algorithm of so many rounds with messages of so many bytes takes that many
times the time of a step, which is one curve over the bytes of a message for all of them, times what it is slower or
faster than that throughout. It needs the closed form of each algorithm's cost, and fewer measurements.

`combined` takes both.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from unisono.algorithms.catalogue.algorithm import Cost
from unisono.tuning.machine.parameters import Curve, curve

Predictions: TypeAlias = dict[str, float]
_Floats: TypeAlias = npt.NDArray[np.float64]


class Point(NamedTuple):
    """A call: a vector of `nbytes` over `size` ranks, `per_host` on each host."""

    collective: str
    nbytes: int
    size: int
    per_host: int = 1


class Round(NamedTuple):
    """What was measured at a point in one job: seconds by algorithm."""

    point: Point
    seconds: Mapping[str, float]


class Widths(NamedTuple):
    """How far rounds count: by e less for each of these steps, the logarithms being those of base 2.

    `level` and `slope` say how strongly planes are held to what all algorithms have in common, and to being level.
    """

    ranks: float = 2.0
    nbytes: float = 2.0
    per_host: float = 1.0
    power_of_two: float = 0.5
    level: float = 0.2
    slope: float = 0.3


USUAL = Widths()


class Interpolation:
    """Times of algorithms between those that were measured, up to a factor that is the same for all of a point."""

    def __init__(self, rounds: Sequence[Round], widths: Widths = USUAL) -> None:
        self._widths = widths
        self._rounds: defaultdict[str, list[Round]] = defaultdict(list)
        for each in rounds:
            self._rounds[each.point.collective].append(each)

    def predict(self, point: Point, algorithms: Sequence[str]) -> Predictions:
        """Return the relative time of each of `algorithms` that was ever measured beside another of them."""
        number = {name: at for at, name in enumerate(algorithms)}
        near = [
            (each.point, [(number[name], math.log2(found)) for name, found in each.seconds.items() if name in number])
            for each in self._rounds[point.collective]
        ]
        near = [(where, times) for where, times in near if len(times) > 1]
        known = {at for _, times in near for at, _ in times}
        levels = self._levels(point, near, len(algorithms)) if near else []
        return {algorithms[at]: 2.0 ** levels[at] for at in sorted(known)}

    def _levels(self, point: Point, near: list[tuple[Point, list[tuple[int, float]]]], count: int) -> list[float]:
        """Return the logarithm of the time of each algorithm at a point: unknowns are planes, then rounds."""
        here = _coordinates(point)
        widths = np.array(self._widths[:4])
        rows = sum(len(times) for _, times in near)
        matrix, right = np.zeros((rows + 3 * count, 3 * count + len(near))), np.zeros(rows + 3 * count)
        row = 0
        for at_round, (where, times) in enumerate(near):
            away = _coordinates(where) - here
            weight = math.exp(-math.hypot(*(away / widths)))
            for at, log_s in times:
                matrix[row, [at, count + at, 2 * count + at, 3 * count + at_round]] = (
                    weight,
                    *(weight * away[:2]),
                    weight,
                )
                right[row] = weight * log_s
                row += 1
        held = np.repeat([self._widths.level, self._widths.slope, self._widths.slope], count)
        matrix[rows + np.arange(3 * count), np.arange(3 * count)] = held
        found: list[float] = _solved(matrix, right)[:count].tolist()
        return found


CostOf: TypeAlias = Callable[[str, str, int], Cost | None]

# Knots of a step, in powers of two of bytes; how strongly it is held to be straight, and factors and rounds to be 1.
_KNOTS = np.arange(0.0, 34.0, 3.0)
_STRAIGHT, _FACTOR, _ROUND = 0.3, 0.3, 0.5


class Steps:
    """A step of each collective, and by what factor each algorithm differs, from measured rounds.

    `cost_of` gives the closed form of (collective, algorithm, ranks), or None where it is not known; what has none is
    not predicted.

    Attributes:
        steps: by collective.
        factors: by collective and algorithm.
    """

    def __init__(self, rounds: Sequence[Round], cost_of: CostOf) -> None:
        self._cost_of = cost_of
        self.steps: dict[str, Curve] = {}
        self.factors: dict[str, dict[str, float]] = {}
        for collective in sorted({each.point.collective for each in rounds}):
            self._fit(collective, [each for each in rounds if each.point.collective == collective])

    def predict(self, point: Point, algorithms: Sequence[str]) -> Predictions:
        """Return the seconds of each of `algorithms` that is known."""
        found = {}
        factors = self.factors.get(point.collective, {})
        for name in algorithms:
            if name in factors and (shape := self._shape(point, name)):
                number, message_nbytes = shape
                found[name] = factors[name] * number * self.steps[point.collective].at(message_nbytes)
        return found

    def _shape(self, point: Point, name: str) -> tuple[float, float] | None:
        """Return how many steps there are, and the bytes of a message."""
        cost = self._cost_of(point.collective, name, point.size)
        if cost is None or not cost.rounds:
            return None
        number = max(cost.rounds, cost.sent)
        return number, max(1.0, point.nbytes * cost.sent / number)

    def _fit(self, collective: str, rounds: Sequence[Round]) -> None:
        found = [
            (at, name, *shape, math.log2(seconds))
            for at, each in enumerate(rounds)
            for name, seconds in each.seconds.items()
            if (shape := self._shape(each.point, name))
        ]
        if not found:
            return
        names = sorted({name for _, name, *_ in found})
        knots, factors = len(_KNOTS), len(names)
        unknown = knots + factors + len(rounds)
        rows = len(found) + knots - 2 + factors + len(rounds)
        matrix, right = np.zeros((rows, unknown)), np.zeros(rows)
        for row, (at, name, number, nbytes, log_s) in enumerate(found):
            matrix[row, :knots] = _between_knots(math.log2(nbytes))
            matrix[row, [knots + names.index(name), knots + factors + at]] = 1.0
            right[row] = log_s - math.log2(number)
        for at in range(knots - 2):
            matrix[len(found) + at, at : at + 3] = _STRAIGHT, -2 * _STRAIGHT, _STRAIGHT
        held = np.concatenate((np.full(factors, _FACTOR), np.full(len(rounds), _ROUND)))
        matrix[len(found) + knots - 2 + np.arange(len(held)), knots + np.arange(len(held))] = held
        solved = _solved(matrix, right).tolist()
        # What was measured of the last step or two may fall by noise; a step never does.
        sizes = [round(2**knot) for knot in _KNOTS.tolist()]
        self.steps[collective] = curve(zip(sizes, (2.0**log_s for log_s in solved[:knots]), strict=True))
        self.factors[collective] = {name: 2.0 ** solved[knots + at] for at, name in enumerate(names)}


def combined(predictions: Sequence[Predictions]) -> Predictions:
    """Return the geometric mean of what several predict, relative to the best of each; what one knows is kept.

    They err in different ways, so that their mean errs less than either.
    """
    logs: defaultdict[str, list[float]] = defaultdict(list)
    for predicted in predictions:
        best = min(predicted.values(), default=1.0)
        for name, seconds in predicted.items():
            logs[name].append(math.log(seconds / best))
    return {name: math.exp(sum(of_name) / len(of_name)) for name, of_name in logs.items()}


def survivors(predicted: Predictions, algorithms: Sequence[str], margin: float) -> list[str]:
    """Return those of `algorithms` worth measuring: predicted within `margin` times the best, or not predicted."""
    best = min(predicted.values(), default=math.inf)
    return [name for name in algorithms if predicted.get(name, 0.0) <= margin * best]


def regret(chosen: str, measured: Mapping[str, float]) -> float:
    """Return how many times as long the chosen algorithm takes as the best one."""
    return measured[chosen] / min(measured.values())


def _coordinates(point: Point) -> _Floats:
    is_power = point.size & (point.size - 1) == 0
    return np.array([math.log2(point.size), math.log2(max(1, point.nbytes)), math.log2(point.per_host), is_power])


def _between_knots(log_nbytes: float) -> _Floats:
    """Return the weights of the knots that a step of so many bytes is interpolated from."""
    weights: _Floats = np.zeros(len(_KNOTS))
    place = float(np.clip(log_nbytes, _KNOTS[0], _KNOTS[-1]))
    low = min(int(np.searchsorted(_KNOTS, place, "right")) - 1, len(_KNOTS) - 2)
    part = float(place - _KNOTS[low]) / (_KNOTS[low + 1] - _KNOTS[low])
    weights[low], weights[low + 1] = 1 - part, part
    return weights


def _solved(matrix: _Floats, right: _Floats) -> _Floats:
    found: _Floats = np.asarray(np.linalg.lstsq(matrix, right, rcond=None)[0], np.float64)
    return found
