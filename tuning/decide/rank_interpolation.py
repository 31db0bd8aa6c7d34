"""Predicts which algorithm is fastest at numbers of ranks and bytes between those that were measured.

Theory of operation
-------------------
Measurements come in *rounds*: all times of one call (collective, ranks, bytes) in one job. The same point may take
twice as long in another job, but then so do the algorithms that it is compared with. So the logarithm of a time is
modelled as the sum of two parts: one of the algorithm at this point, and one of the round. Only the first decides.

`Interpolation` needs no knowledge of algorithms. Near the requested point, the logarithm of an algorithm's time is a
plane over the logarithms of ranks and bytes. A round counts less the further away it is. It also counts less if its
number of ranks is a power of two and the point's is not, or if its hosts have more ranks. One least-squares problem
gives all planes and all rounds.

`Steps` is a model in the manner of PLogP. An algorithm takes a number of steps with messages of some bytes, and a step
takes a time that depends only on these bytes: one curve for all algorithms of a collective. Each algorithm also has one
factor by which it is slower or faster. This model needs the closed-form cost of each algorithm, and fewer measurements.

`combined` averages both.
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


class MeasuredPoint(NamedTuple):
    """A call: a vector of `nbytes` over `size` ranks, `per_host` on each host."""

    collective: str
    nbytes: int
    size: int
    per_host: int = 1


class Round(NamedTuple):
    """The measurements at one point in one job: seconds by algorithm."""

    point: MeasuredPoint
    seconds: Mapping[str, float]


class Widths(NamedTuple):
    """The widths of the kernel that weights rounds: a weight falls by a factor e for each width, in log2 units.

    `level` and `slope` say how strongly a plane is drawn to the level of all algorithms and to slope 0.
    """

    ranks: float = 2.0
    nbytes: float = 2.0
    per_host: float = 1.0
    power_of_two: float = 0.5
    level: float = 0.2
    slope: float = 0.3


USUAL = Widths()


class Interpolation:
    """Predicts relative times of algorithms near measured points, up to a factor common to a point."""

    def __init__(self, rounds: Sequence[Round], widths: Widths = USUAL) -> None:
        self._widths = widths
        self._rounds: defaultdict[str, list[Round]] = defaultdict(list)
        for round_ in rounds:
            self._rounds[round_.point.collective].append(round_)

    def predict(self, point: MeasuredPoint, algorithms: Sequence[str]) -> Predictions:
        """Return the relative time of each of `algorithms` that was ever measured together with another of them."""
        number = {name: at for at, name in enumerate(algorithms)}
        near = [
            (each.point, [(number[name], math.log2(time_s)) for name, time_s in each.seconds.items() if name in number])
            for each in self._rounds[point.collective]
        ]
        near = [(where, times) for where, times in near if len(times) > 1]
        numbers = {at for _, times in near for at, _ in times}
        levels = self._levels(point, near, len(algorithms)) if near else []
        return {algorithms[at]: 2.0 ** levels[at] for at in sorted(numbers)}

    def _levels(
        self, point: MeasuredPoint, near: list[tuple[MeasuredPoint, list[tuple[int, float]]]], count: int
    ) -> list[float]:
        """Return the logarithm of each algorithm's time at a point. The unknowns are the planes, then the rounds."""
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
        levels: list[float] = _solved(matrix, right)[:count].tolist()
        return levels


CostOf: TypeAlias = Callable[[str, str, int], Cost | None]

# The knots of a step's curve, as powers of two of bytes. Then the weights that hold the curve straight, the factors at
# 1, and the rounds at 1.
_KNOTS = np.arange(0.0, 34.0, 3.0)
_STRAIGHT, _FACTOR, _ROUND = 0.3, 0.3, 0.5


class Steps:
    """Predicts times by one step curve for each collective and one factor for each algorithm, fitted to rounds.

    `cost_of` returns the closed form of (collective, algorithm, ranks), or None if it is not known. An algorithm
    without one gets no prediction.

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

    def predict(self, point: MeasuredPoint, algorithms: Sequence[str]) -> Predictions:
        """Return the seconds of each of `algorithms` that has a factor and a cost."""
        predictions = {}
        factors = self.factors.get(point.collective, {})
        for name in algorithms:
            if name in factors and (shape := self._shape(point, name)):
                number, message_nbytes = shape
                predictions[name] = factors[name] * number * self.steps[point.collective].at(message_nbytes)
        return predictions

    def _shape(self, point: MeasuredPoint, name: str) -> tuple[float, float] | None:
        """Return the number of steps, and the bytes of a message."""
        cost = self._cost_of(point.collective, name, point.size)
        if cost is None or not cost.rounds:
            return None
        number = max(cost.rounds, cost.sent)
        return number, max(1.0, point.nbytes * cost.sent / number)

    def _fit(self, collective: str, rounds: Sequence[Round]) -> None:
        points = [
            (at, name, *shape, math.log2(seconds))
            for at, each in enumerate(rounds)
            for name, seconds in each.seconds.items()
            if (shape := self._shape(each.point, name))
        ]
        if not points:
            return
        names = sorted({name for _, name, *_ in points})
        knots, factors = len(_KNOTS), len(names)
        unknown = knots + factors + len(rounds)
        rows = len(points) + knots - 2 + factors + len(rounds)
        matrix, right = np.zeros((rows, unknown)), np.zeros(rows)
        for row, (at, name, number, nbytes, log_s) in enumerate(points):
            matrix[row, :knots] = _between_knots(math.log2(nbytes))
            matrix[row, [knots + names.index(name), knots + factors + at]] = 1.0
            right[row] = log_s - math.log2(number)
        for at in range(knots - 2):
            matrix[len(points) + at, at : at + 3] = _STRAIGHT, -2 * _STRAIGHT, _STRAIGHT
        held = np.concatenate((np.full(factors, _FACTOR), np.full(len(rounds), _ROUND)))
        matrix[len(points) + knots - 2 + np.arange(len(held)), knots + np.arange(len(held))] = held
        solved = _solved(matrix, right).tolist()
        # Measured times of the last steps may fall because of noise, but a true step never takes less for more bytes.
        sizes = [round(2**knot) for knot in _KNOTS.tolist()]
        self.steps[collective] = curve(zip(sizes, (2.0**log_s for log_s in solved[:knots]), strict=True))
        self.factors[collective] = {name: 2.0 ** solved[knots + at] for at, name in enumerate(names)}


def combined(predictions: Sequence[Predictions]) -> Predictions:
    """Return the geometric mean of several predictions, each relative to its best; names that only one has are kept.

    The models err in different ways, so their mean errs less than either.
    """
    logs: defaultdict[str, list[float]] = defaultdict(list)
    for predicted in predictions:
        best = min(predicted.values(), default=1.0)
        for name, seconds in predicted.items():
            logs[name].append(math.log(seconds / best))
    return {name: math.exp(sum(of_name) / len(of_name)) for name, of_name in logs.items()}


def survivors(predicted: Predictions, algorithms: Sequence[str], margin: float) -> list[str]:
    """Return the algorithms that are worth measuring: within `margin` times the predicted best, or not predicted."""
    best = min(predicted.values(), default=math.inf)
    return [name for name in algorithms if predicted.get(name, 0.0) <= margin * best]


def regret(chosen: str, measured: Mapping[str, float]) -> float:
    """Return the ratio of the chosen algorithm's time to the best time."""
    return measured[chosen] / min(measured.values())


def _coordinates(point: MeasuredPoint) -> _Floats:
    is_power = point.size & (point.size - 1) == 0
    return np.array([math.log2(point.size), math.log2(max(1, point.nbytes)), math.log2(point.per_host), is_power])


def _between_knots(log_nbytes: float) -> _Floats:
    """Return the weight of each knot in the interpolated time of a step; `log_nbytes` is the log of its bytes."""
    weights: _Floats = np.zeros(len(_KNOTS))
    place = float(np.clip(log_nbytes, _KNOTS[0], _KNOTS[-1]))
    low = min(int(np.searchsorted(_KNOTS, place, "right")) - 1, len(_KNOTS) - 2)
    part = float(place - _KNOTS[low]) / (_KNOTS[low + 1] - _KNOTS[low])
    weights[low], weights[low + 1] = 1 - part, part
    return weights


def _solved(matrix: _Floats, right: _Floats) -> _Floats:
    solution: _Floats = np.asarray(np.linalg.lstsq(matrix, right, rcond=None)[0], np.float64)
    return solution
