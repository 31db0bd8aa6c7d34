"""Races: find the fastest of several candidates in one job, on a machine with other load.

Theory of operation
-------------------
A race is a sequence of blocks. In each block, every remaining candidate runs some calls, in random order. Only times of
the same block are divided by each other, so a slowdown of a whole block cancels out.

The leading candidate (the *sentinel*) runs at both ends of a block. If its two times differ by more than 10 %, the
machine has changed in between, and the block runs again.

After each block, a candidate leaves if it is more than 5 % slower than the leader, with confidence. The race ends when
the leader is at most 3 % slower than any other candidate, with confidence, or when the budget is spent.

The time of a candidate in a block is the mean of the middle half of its calls (`typical_s`). Other load delays few
calls, and these do not count. Why not a quantile: where ranks share cores, calls take one of two times, such as 5.7 and
8.7 µs, depending on the order in which the ranks have run. A quantile would be the one that is slightly more frequent.

Confidence comes from order statistics of the paired ratios, which assume no distribution (Hunold, Carpen-Amarie 2016).

This module is pure: a callable runs candidates and returns the cost. All ranks of a job get the same times, so they
decide alike without further messages.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple, TypeAlias

# Runs a candidate and returns the seconds of each call, which are equal on all ranks, and the seconds of the whole run.
Run: TypeAlias = Callable[[str], tuple[Sequence[float], float]]

CONFIDENCE = 0.95
WORSE = 1.05
RESOLVED = 0.97
DRIFT = 1.10
# While there are too few blocks for an interval, a candidate leaves if it was slower by this factor in every block. One
# block suffices only if calls are long compared with the time slice of another process.
_HOPELESS = {1: 2.0, 2: 1.5, 3: 1.3, 4: 1.15}
_LONG_S = 1e-3
_FEWEST_CALLS = 3
# This many candidates run even if the budget is spent.
_AT_LEAST = 2
# At most this many blocks are discarded for each block that counts. If single calls already differ by more than
# `DRIFT`, drift is the rule, and discarding would spend the budget on blocks that decide nothing.
_MOST_DISCARDED = 0.5


class Rules(NamedTuple):
    """The rules by which candidates leave a race, and by which the race ends.

    Attributes:
        fewest, most: numbers of blocks that count.
        budget_s: seconds after which no block begins. In the first block, two candidates run in any case.
    """

    fewest: int = 3
    most: int = 12
    budget_s: float = math.inf


class Lap(NamedTuple):
    """One candidate of a race, with its times up to now.

    Attributes:
        candidate: its name.
        times_s: its typical time in each of its blocks. For the winner, these are the times themselves. For another
            candidate, each is the winner's median times the ratio of the two in that block, so that it does not matter
            which blocks these were.
        dropped: whether the candidate left before the end.
    """

    candidate: str
    times_s: tuple[float, ...]
    dropped: bool

    @property
    def median_s(self) -> float:
        """The median over its blocks."""
        return median(self.times_s)


class Outcome(NamedTuple):
    """The result of a race: the winner, all candidates in their order, discarded blocks, and the cost in seconds."""

    winner: str
    laps: tuple[Lap, ...]
    discarded: int
    cost_s: float


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return two of `values` that enclose the median with at least `confidence`, whatever the distribution.

    With too few values (fewer than 6 for 95 %), return the least and the greatest.

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
    """Return the value below which `part` of the values are, interpolated between neighbours."""
    ordered, place = sorted(values), part * (len(values) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def typical_s(calls_s: Sequence[float]) -> float:
    """Return the typical time of a call: the mean of the middle half of the times.

    >>> typical_s([1.0, 2.0, 4.0, 9.0, 90.0])
    5.0
    """
    trimmed = round(len(calls_s) / 4)
    middle = sorted(calls_s)[trimmed : len(calls_s) - trimmed]
    return sum(middle) / len(middle)


def _is_slower(ratios: Sequence[float]) -> bool:
    """Return whether a candidate is more than 5 % slower, with confidence, by its ratios to the leader."""
    return interval(ratios)[0] > _HOPELESS.get(len(ratios), WORSE)


def is_beaten(ratios: Sequence[float]) -> bool:
    """Return whether single calls show an algorithm to be slower than another; False with fewer than three of them.

    >>> is_beaten([3.0, 2.0]), is_beaten([3.0, 1.4, 2.0]), is_beaten([3.0, 1.2, 2.0])
    (False, True, False)
    """
    return len(ratios) >= _FEWEST_CALLS and _is_slower(ratios)


def race(candidates: Sequence[str], run: Run, rules: Rules, draw: random.Random) -> Outcome:
    """Return the outcome of a race between the candidates.

    Args:
        candidates: at least one, all different, the most promising ones first.
        run: runs one candidate.
        rules: when to stop.
        draw: the source of the order in each block, with the same state on all ranks.
    """
    return _Race(candidates, run, rules, draw).run()


class _Race:
    def __init__(self, candidates: Sequence[str], run: Run, rules: Rules, draw: random.Random) -> None:
        self._run = run
        self._rules = rules
        self._draw = draw
        self._times: dict[str, list[float]] = {candidate: [] for candidate in candidates}
        self._remaining = list(candidates)
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
            if len(self._remaining) == 1 and blocks >= min(2, self._rules.most):
                break
            if blocks >= self._rules.fewest and self._is_resolved():
                break
        winner = self._leader()
        laps = tuple(Lap(name, self._comparable(name, winner), name not in self._remaining) for name in self._times)
        return Outcome(winner, laps, self._discarded, self._cost_s)

    def _comparable(self, name: str, winner: str) -> tuple[float, ...]:
        if name == winner:
            return tuple(self._times[name])
        return tuple(median(self._times[winner]) * ratio for ratio in self._ratios(name, winner))

    def _block(self) -> int:
        """Run all remaining candidates; return 1 if the block counts, 0 if the machine changed in it."""
        if not self._times[self._remaining[0]]:
            return self._first_block()
        order = self._draw.sample(self._remaining, len(self._remaining))
        first = self._sentinel_s
        times = {name: self._timed(name) for name in order}
        self._sentinel_s = None
        if len(self._remaining) > 1:
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
        """Run the candidates in their order; after the first two, only as many as the budget allows."""
        for number, name in enumerate(self._remaining):
            if number < _AT_LEAST or self._cost_s < self._rules.budget_s:
                self._times[name].append(self._timed(name))
        self._remaining = [name for name in self._remaining if self._times[name]]
        self._times = {name: self._times[name] for name in self._remaining}
        return 1

    def _timed(self, candidate: str) -> float:
        times, cost_s = self._run(candidate)
        self._cost_s += cost_s
        return typical_s(times)

    def _leader(self) -> str:
        """Return the fastest remaining candidate, by its ratio to the mean of all of them in each block."""
        rows = list(zip(*(self._times[name] for name in self._remaining), strict=True))
        means = [math.exp(sum(map(math.log, row)) / len(row)) for row in rows]
        return min(
            self._remaining, key=lambda name: median(s / mean for s, mean in zip(self._times[name], means, strict=True))
        )

    def _ratios(self, name: str, leader: str) -> list[float]:
        """Return the ratio of a candidate's time to the leader's in each of its blocks; the leader ran in all."""
        return [mine / best for mine, best in zip(self._times[name], self._times[leader], strict=False)]

    def _drop(self) -> None:
        leader = self._leader()
        blocks = len(self._times[leader])
        if blocks == 1 and self._times[leader][0] < _LONG_S:
            return
        self._remaining = [
            name for name in self._remaining if name == leader or not _is_slower(self._ratios(name, leader))
        ]

    def _is_resolved(self) -> bool:
        leader = self._leader()
        return all(interval(self._ratios(name, leader))[0] >= RESOLVED for name in self._remaining if name != leader)
