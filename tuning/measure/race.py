"""Races: which of several candidates is fastest, found in one job on a machine that is not quiet.

Theory of operation. A race is a sequence of blocks, in each of which every candidate that is left runs some calls, in
random order. What slows a whole block down cancels out where candidates are compared, because only times of the same
block are divided by each other. The candidate that leads runs at both ends of a block too (the sentinel): where its
two times differ by more than 10 %, the machine has changed meanwhile, and the block is run again. After each block,
candidates leave that are surely more than 5 % slower than the leader. The race is over when the leader is surely not
more than 3 % slower than any other, or with the budget.

The time of a candidate in a block is the mean of the middle half of its calls (`typical_s`). What others take of the
machine falls on few calls, which do not count. But where ranks share cores, calls take one of two times, as 5.7 and
8.7 µs, by the order in which the ranks have run: a quantile would be either, by which is a little more frequent.

"Surely" is by order statistics of the paired ratios, which assume no distribution (Hunold, Carpen-Amarie 2016).

This is pure: candidates run by a callable, which also says how long that took. So all ranks of a job that are told the
same times decide alike without another word.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple, TypeAlias

# Runs a candidate: the seconds of each call of all ranks, and what all that has cost in seconds. The same on all ranks.
Run: TypeAlias = Callable[[str], tuple[Sequence[float], float]]

CONFIDENCE = 0.95
WORSE = 1.05
RESOLVED = 0.97
DRIFT = 1.10
# While there are too few blocks for an interval: how much slower a candidate that leaves was in every block, at least.
# One block is enough only where a call is long beside the turn of another process.
_HOPELESS = {1: 2.0, 2: 1.5, 3: 1.3, 4: 1.15}
_LONG_S = 1e-3
# Candidates that run whatever the budget is.
_AT_LEAST = 2
# Of blocks in which the machine changed, so many are run again for each that counts; more of them are no exception, and
# count: where single calls differ by as much, the budget would go into blocks that tell nothing.
_MOST_DISCARDED = 0.5


class Rules(NamedTuple):
    """When a race ends.

    Attributes:
        fewest, most: blocks that count.
        budget_s: seconds after which no block begins; in the first one, two candidates run in any case.
    """

    fewest: int = 3
    most: int = 12
    budget_s: float = math.inf


class Lap(NamedTuple):
    """One candidate in one race.

    Attributes:
        candidate: what ran.
        times_s: what its calls typically took in each block that it took part in: of the winner as it was; of
            another, the winner's median times the ratio of the two in that block, so it does not matter which blocks
            those were.
        dropped: whether it left before the end.
    """

    candidate: str
    times_s: tuple[float, ...]
    dropped: bool

    @property
    def median_s(self) -> float:
        """The median over its blocks."""
        return median(self.times_s)


class Outcome(NamedTuple):
    """What a race has found: the winner, all that have run, in the order given, and how much the race has cost."""

    winner: str
    laps: tuple[Lap, ...]
    discarded: int
    cost_s: float


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return two of `values` between which their median lies with at least `confidence`, whatever their distribution.

    Of fewer values than that takes (6 for 95 %), the least and the greatest.

    >>> interval([5.0, 1.0, 2.0, 9.0, 4.0, 3.0, 8.0, 7.0])
    (1.0, 9.0)
    """
    ordered, number = sorted(values), len(values)
    outside, low = 0.0, 0
    for k in range(number // 2):
        outside += 2 * math.comb(number, k) / 2**number
        if outside > 1 - confidence:
            break
        low = k
    return ordered[low], ordered[number - 1 - low]


def quantile(values: Sequence[float], part: float) -> float:
    """Return the value below which `part` of the values are, between two of them by proportion."""
    ordered, place = sorted(values), part * (len(values) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def typical_s(calls_s: Sequence[float]) -> float:
    """Return how long a call usually takes: the mean of the middle half of the times.

    >>> typical_s([1.0, 2.0, 4.0, 9.0, 90.0])
    5.0
    """
    aside = round(len(calls_s) / 4)
    middle = sorted(calls_s)[aside : len(calls_s) - aside]
    return sum(middle) / len(middle)


def race(candidates: Sequence[str], run: Run, rules: Rules, draw: random.Random) -> Outcome:
    """Return which of the candidates is fastest.

    Args:
        candidates: at least one, all different, the most promising ones first.
        run: runs one of them.
        rules: when to stop.
        draw: gives the order in each block; with the same state on all ranks.
    """
    return _Race(candidates, run, rules, draw).run()


class _Race:
    def __init__(self, candidates: Sequence[str], run: Run, rules: Rules, draw: random.Random) -> None:
        self._run = run
        self._rules = rules
        self._draw = draw
        self._times: dict[str, list[float]] = {candidate: [] for candidate in candidates}
        self._left = list(candidates)
        self._cost_s = 0.0
        self._discarded = 0
        self._sentinel_s: tuple[str, float] | None = None

    def run(self) -> Outcome:
        blocks = 0
        while blocks < self._rules.most and (not blocks or self._cost_s < self._rules.budget_s):
            blocks += self._block()
            if not blocks:
                continue
            self._drop()
            if len(self._left) == 1 and blocks >= min(2, self._rules.most):
                break
            if blocks >= self._rules.fewest and self._is_resolved():
                break
        winner = self._leader()
        laps = tuple(Lap(name, self._comparable(name, winner), name not in self._left) for name in self._times)
        return Outcome(winner, laps, self._discarded, self._cost_s)

    def _comparable(self, name: str, winner: str) -> tuple[float, ...]:
        if name == winner:
            return tuple(self._times[name])
        return tuple(median(self._times[winner]) * ratio for ratio in self._ratios(name, winner))

    def _block(self) -> int:
        """Run all that are left; return 1 if the block counts, 0 if the machine changed in it."""
        if not self._times[self._left[0]]:
            return self._first_block()
        order = self._draw.sample(self._left, len(self._left))
        first = self._sentinel_s
        times = {name: self._timed(name) for name in order}
        self._sentinel_s = None
        if len(self._left) > 1:
            leader = self._leader()
            before = first[1] if first and first[0] == leader else times[leader]
            after = self._timed(leader)
            self._sentinel_s = (leader, after)
            drift = max(before, after) / min(before, after)
            if drift > DRIFT and self._discarded < _MOST_DISCARDED * len(self._times[leader]):
                self._discarded += 1
                return 0
        for name, seconds in times.items():
            self._times[name].append(seconds)
        return 1

    def _first_block(self) -> int:
        """Run all candidates in the order given, but after two of them only those that the budget suffices for."""
        for number, name in enumerate(self._left):
            if number < _AT_LEAST or self._cost_s < self._rules.budget_s:
                self._times[name].append(self._timed(name))
        self._left = [name for name in self._left if self._times[name]]
        self._times = {name: self._times[name] for name in self._left}
        return 1

    def _timed(self, candidate: str) -> float:
        times, cost_s = self._run(candidate)
        self._cost_s += cost_s
        return typical_s(times)

    def _leader(self) -> str:
        """Return the fastest of those that are left, by how it compares with all of them in each block."""
        rows = list(zip(*(self._times[name] for name in self._left), strict=True))
        means = [math.exp(sum(map(math.log, row)) / len(row)) for row in rows]
        return min(
            self._left, key=lambda name: median(s / mean for s, mean in zip(self._times[name], means, strict=True))
        )

    def _ratios(self, name: str, leader: str) -> list[float]:
        """Return how many times as long as the leader it took in each of its blocks; the leader was in all of them."""
        return [mine / best for mine, best in zip(self._times[name], self._times[leader], strict=False)]

    def _drop(self) -> None:
        leader = self._leader()
        blocks = len(self._times[leader])
        if blocks == 1 and self._times[leader][0] < _LONG_S:
            return
        worse = _HOPELESS.get(blocks, WORSE)
        self._left = [name for name in self._left if name == leader or interval(self._ratios(name, leader))[0] <= worse]

    def _is_resolved(self) -> bool:
        leader = self._leader()
        return all(interval(self._ratios(name, leader))[0] >= RESOLVED for name in self._left if name != leader)
