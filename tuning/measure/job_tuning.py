"""Tunes the calls of a running job: which call is a trial, of which algorithm, and what the trials cost.

Theory of operation
-------------------
A job makes many calls for which the tuner chooses an algorithm. One call in a number is a *turn*. The first turn of a
kind of calls runs the chosen algorithm (the *champion*), the next one another algorithm (a *rival*), and so on. After
each turn all ranks agree on its time. So each trial of a rival has a time of the champion a few calls before it, and
the ratio of the two counts, as in a race.

All ranks make the same calls, so they count alike, and a turn falls on the same call on all of them. Everything else
that decides comes from facts on which the ranks have agreed in earlier turns. So all ranks choose alike.

A budget limits the cost. The time of calls on the rank that waited least is the communication time of the job. All that
turns have cost beyond the fastest known algorithm may be at most 2 % of it:

1. the work around the call: choosing, building a plan, and agreeing. It may take half of the budget, which decides how
   many calls are between two turns;
2. the time that trials took longer. A rival whose predicted time, or whose measured one, does not fit into the rest of
   the budget has to wait. A rival that is predicted to be far slower is never tried.

The first trial of a rival does not count, because it builds the plan and opens channels. A rival leaves when its ratios
show with confidence that it is slower, or after 12 more trials. Only rivals that are slower or faster with confidence
are in the measurements, because among many variants one would look best by luck.

Worked example: calls of 100 us, of which one in 8 is a turn. The work around a turn takes 60 us. After 100 ms of
communication the budget is 2 ms, and 1 ms of it is for the work around 16 turns, so a turn comes only every 60 calls.

This module is pure: it gets times and returns decisions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from unisono.algorithms.catalogue.registry import find
from unisono.algorithms.catalogue.variants import parsed
from unisono.tuning.decide.choice import Question, TunerState, candidate
from unisono.tuning.decide.table import compiled
from unisono.tuning.measure.campaign import FAR_BEHIND, measured, open_candidates
from unisono.tuning.measure.measurement_log import Context, Measurement
from unisono.tuning.measure.race import Lap, interval, is_beaten

# The part of the communication time that turns may cost, and the part of that for the work around calls.
BUDGET = 0.02
_AROUND = 0.5
# Calls before the first turn, and between two turns.
FIRST = 16
LEAST, MOST = 8, 1 << 20
# Calls between two turns when no rival remains.
IDLE = 1 << 16
# The cost of a first trial is assumed to be this, because it builds the plan and opens channels.
_FIRST_TRIAL_NS = 5_000_000
_MOST_RIVALS, _MOST_KINDS = 6, 64
# Trials of a rival that count: with fewer it cannot be faster with confidence, and after the most it leaves.
FEWEST_TRIALS, MOST_TRIALS = 6, 12


class Kind(NamedTuple):
    """The calls that are compared: those of one collective with as many bytes and the same class of dtypes."""

    collective: str
    nbytes: int
    dtype: str


class Facts(NamedTuple):
    """The facts of a turn, in nanoseconds, on which the ranks have agreed.

    Attributes:
        call_ns: from the moment when the last rank of a host has begun the call until the last one has ended it, on the
            slowest host.
        around_ns: the work of the slowest rank around the call.
        communicating_ns: the time of all calls of the job so far, on the rank that waited least.
    """

    call_ns: int
    around_ns: int
    communicating_ns: int


class _Contest:
    """The champion and the rivals of one kind of calls.

    Args:
        question: the call.
        champion: the variant that the tuner has chosen.
        rivals: by variant, its predicted time divided by that of the champion; the most promising ones first.
    """

    def __init__(self, question: Question, champion: str, rivals: Mapping[str, float]) -> None:
        self.question = question
        self.champion = champion
        self.rivals = dict(rivals)
        self._champion_ns = list[int]()
        self._trials: dict[str, list[int]] = {name: [] for name in rivals}
        self._ratios: dict[str, list[float]] = {name: [] for name in rivals}
        self._is_champions_turn = True

    def next_rival(self) -> str | None:
        """Return the rival with the fewest trials; None if it is the champion's turn, or if no rival remains."""
        if self._is_champions_turn or not self.rivals:
            return None
        return min(self.rivals, key=lambda name: len(self._trials[name]))

    def best_ns(self) -> float:
        """Return the time of the fastest known variant; 0 before the first turn."""
        own = [median(self._champion_ns)] if self._champion_ns else []
        return min([*own, *(own[0] * median(ratios) for ratios in self._ratios.values() if ratios and own)], default=0)

    def extra_ns(self, rival: str) -> float:
        """Return the expected cost of a trial of a rival beyond the fastest known variant."""
        ratios, is_first = self._ratios[rival], not self._trials[rival]
        expected = median(self._champion_ns) * (median(ratios) if ratios else self.rivals[rival])
        return max(0.0, expected - self.best_ns()) + _FIRST_TRIAL_NS * is_first

    def note(self, variant: str, call_ns: int) -> float:
        """Record the time of a turn; return its cost beyond the fastest variant that was known before."""
        best_ns, call_ns = self.best_ns(), max(1, call_ns)
        if variant == self.champion:
            self._champion_ns.append(call_ns)
            self._is_champions_turn = False
            return 0.0
        self._is_champions_turn = True
        trials, ratios = self._trials[variant], self._ratios[variant]
        trials.append(call_ns)
        if len(trials) > 1:
            ratios.append(call_ns / self._champion_ns[-1])
        if is_beaten(ratios) or len(ratios) >= MOST_TRIALS:
            self.rivals.pop(variant, None)
        return max(0.0, call_ns - best_ns)

    def laps(self) -> list[Lap]:
        """Return the times of the champion, and of the rivals whose trials are sure; none without such a rival."""
        sure = {name: ratios for name, ratios in self._ratios.items() if is_beaten(ratios) or _is_faster(ratios)}
        if not sure:
            return []
        usual_s = median(self._champion_ns) / 1e9
        return [
            Lap(self.champion, tuple(each / 1e9 for each in self._champion_ns), False),
            *(
                Lap(name, tuple(usual_s * each for each in ratios), name not in self.rivals)
                for name, ratios in sure.items()
            ),
        ]


class JobTuning:
    """The tuning of the calls of one communicator. Equal calls of its methods give equal answers on all ranks.

    Attributes:
        pause: the number of calls until the next turn.
    """

    def __init__(self) -> None:
        self.pause = FIRST
        self._contests: dict[Kind, _Contest] = {}
        self._calls = 0
        self._turns = 0
        self._around_ns = 0
        self._spent_ns = 0.0
        self._communicating_ns = 0

    def is_new(self, question: Question) -> bool:
        """Return whether a call is of a kind that is not open yet, and may be opened."""
        return _kind(question) not in self._contests and len(self._contests) < _MOST_KINDS

    def open(self, question: Question, champion: str, state: TunerState) -> None:
        """Note a new kind of calls and its rivals.

        Args:
            question: a call for which the tuner may choose any algorithm.
            champion: the variant that it has chosen.
            state: the state by which it chooses.
        """
        self._contests[_kind(question)] = _Contest(question, champion, rivals(question, champion, state))

    def trial(self, question: Question) -> str | None:
        """Return the rival that runs in this turn; None if the champion runs."""
        contest = self._contests.get(_kind(question))
        rival = contest.next_rival() if contest else None
        if contest is None or rival is None:
            return None
        fits = self._spent_ns + contest.extra_ns(rival) <= BUDGET * self._communicating_ns
        return rival if fits else None

    def refuse(self, question: Question, rival: str) -> None:
        """Note that a rival cannot run."""
        self._contests[_kind(question)].rivals.pop(rival, None)

    def note(self, question: Question | None, rival: str | None, facts: Facts) -> None:
        """Record the facts of a turn, and set the `pause` to the next one.

        Args:
            question: the call; None if it was one whose algorithm is not to be changed.
            rival: the rival that has run; None for the champion.
            facts: the facts on which the ranks have agreed.
        """
        self._calls += self.pause + 1
        self._turns += 1
        self._communicating_ns = facts.communicating_ns
        self._around_ns += facts.around_ns
        self._spent_ns += facts.around_ns
        contest = None if question is None else self._contests.get(_kind(question))
        if contest is not None:
            self._spent_ns += contest.note(rival or contest.champion, facts.call_ns)
        self.pause = self._pause()

    def _pause(self) -> int:
        """Return after how many calls the work around the next turn fits into its part of the budget."""
        if self._contests and not any(contest.rivals for contest in self._contests.values()):
            return IDLE
        of_call_ns = _AROUND * BUDGET * self._communicating_ns / self._calls
        if of_call_ns <= 0:
            return MOST
        missing_ns = self._around_ns * (1 + 1 / self._turns) - _AROUND * BUDGET * self._communicating_ns
        return min(MOST, max(LEAST, math.ceil(missing_ns / of_call_ns)))

    def measurements(self, about: Mapping[str, Any], before: Sequence[Measurement] = ()) -> list[Measurement]:
        """Return the measurements of all kinds.

        Args:
            about: the fields machine, job, library, date and trial.
            before: earlier measurements of the table. The load of jobs differs, so the times of each kind are scaled
                to earlier ones of the same variant, as far as there are some.
        """
        table, result = compiled(before), list[Measurement]()
        for contest in self._contests.values():
            context, nbytes, laps = (
                _context(contest.question, about["machine"]),
                contest.question.nbytes,
                contest.laps(),
            )
            earlier = table.decisions[context].measured_at(nbytes) if context in table.decisions else {}
            factor = next((earlier[lap.candidate] / lap.median_s for lap in laps if lap.candidate in earlier), 1.0)
            result += [
                measured(context, lap._replace(times_s=tuple(factor * each for each in lap.times_s)), nbytes, about)
                for lap in laps
            ]
        return result


def rivals(question: Question, champion: str, state: TunerState) -> dict[str, float]:
    """Return the variants to try beside the champion, each with its predicted time divided by that of the champion.

    They are at most `FAR_BEHIND` times slower than the best by prediction, and change no property of the result: they
    give all ranks the same bits, and run in place, because other ranks may call so.
    """
    predicted = {
        each.variant: each.predicted_s
        for each in open_candidates(question, state)
        if each.predicted_s is not None and _is_exchangeable(question.collective, each.algorithm)
    }
    own = candidate(parsed(champion), question, state, None, is_named=True).predicted_s
    best_s = min(predicted.values(), default=0.0)
    near = [name for name, seconds in predicted.items() if seconds <= FAR_BEHIND * best_s and name != champion]
    return {
        name: predicted[name] / own if own else 1.0 for name in sorted(near, key=predicted.__getitem__)[:_MOST_RIVALS]
    }


def _is_faster(ratios: Sequence[float]) -> bool:
    """Return whether trials show with confidence that a rival is faster than the champion."""
    return len(ratios) >= FEWEST_TRIALS and interval(ratios)[1] < 1


def _is_exchangeable(collective: str, name: str) -> bool:
    algorithm = find(collective, name)
    return algorithm.same_bits and algorithm.in_place and not algorithm.mapped and not algorithm.vendor


def _kind(question: Question) -> Kind:
    return Kind(question.collective, question.nbytes, question.dtype)


def _context(question: Question, machine: str) -> Context:
    return Context(machine, question.collective, question.link, question.dtype, question.size, question.ranks_per_host)


def agreed_facts(rows: Sequence[int], hosts: int) -> Facts:
    """Return the facts from the largest value of each item of `facts_of_rank` over all ranks."""
    spans = [ended - began for began, ended in zip(rows[:hosts], rows[hosts : 2 * hosts], strict=True)]
    return Facts(max(spans), rows[-2], -rows[-1])


def facts_of_rank(host: int, hosts: int, call: tuple[int, int], around_ns: int, communicating_ns: int) -> list[int]:
    """Return the facts of one rank in the form in which the ranks exchange their largest values.

    Args:
        host: the host of the rank, because the clocks of hosts differ.
        hosts: the number of hosts.
        call: when the rank began and ended the call, by the clock of its host.
        around_ns: as in `Facts`, for this rank.
        communicating_ns: the same.

    >>> facts = facts_of_rank(0, 1, (100, 190), 7, 1000), facts_of_rank(0, 1, (120, 200), 5, 900)
    >>> agreed_facts(list(map(max, *facts)), 1)
    Facts(call_ns=80, around_ns=7, communicating_ns=900)
    """
    times = [[NEVER_NS] * hosts, [NEVER_NS] * hosts]
    times[0][host], times[1][host] = call
    return [*times[0], *times[1], around_ns, -communicating_ns]


# An earlier time than that of any call.
NEVER_NS = -(1 << 62)
