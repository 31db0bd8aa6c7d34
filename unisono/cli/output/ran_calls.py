"""Compares the times of the calls that a job made with predictions, and shows which of them would gain by tuning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from unisono.algorithms.catalogue.variants import parsed
from unisono.bench.sizes import format_size
from unisono.cli.output.terminal import add_names
from unisono.errors import NoAlgorithmError, UsageError
from unisono.postmortem.timings import CallKind, KindTimes, total_s
from unisono.tuning.decide.choice import Candidate, Explanation, Question

# A call would gain if another algorithm takes at most this part of the time of the one that ran.
_WORTH_IT = 0.95


class RanCalls(NamedTuple):
    """The calls of one kind beside their prediction.

    Attributes:
        times: the calls and their measured time.
        predicted_s: the time of the algorithm that ran, by the table or the model; None if they do not know it.
        best: the algorithm that is fastest by the table or the model; empty if none is known to be faster.
        best_s: its expected time: the measured one in proportion to the predictions of the two.
    """

    times: KindTimes
    predicted_s: float | None
    best: str = ""
    best_s: float | None = None

    @property
    def gain_s(self) -> float:
        """The seconds that all calls together would take less by the best algorithm."""
        return 0.0 if self.best_s is None else self.times.calls * (self.times.median_s - self.best_s)


def question_of(kind: CallKind, cores: int) -> Question:
    """Return the question to the tuner about calls of a kind, on hosts with so many cores."""
    return Question(
        kind.name,
        kind.nbytes,
        sum(map(len, kind.hosts)),
        kind.link,
        varying=kind.name != kind.collective,
        hosts=kind.hosts,
        crowd=max(1.0, max(map(len, kind.hosts)) / cores),
        dtype=kind.dtype,
    )


def compared(times: Sequence[KindTimes], explain: Callable[[Question], Explanation], cores: int) -> Iterator[RanCalls]:
    """Yield the calls beside their predictions, those that would gain the most first.

    Args:
        times: the calls.
        explain: returns the explanation of a call, with the predicted and measured times of all algorithms.
        cores: the number of cores of each host.
    """
    rows = [_compared(each, explain, cores) for each in times]
    yield from sorted(rows, key=lambda row: -row.gain_s)


def _compared(times: KindTimes, explain: Callable[[Question], Explanation], cores: int) -> RanCalls:
    kind = times.kind
    try:
        explanation = explain(question_of(kind, cores))
    except (NoAlgorithmError, UsageError):
        return RanCalls(times, None)
    own = _candidate(explanation, kind.algorithm)
    best = next((each for each in explanation.candidates if each.in_order == explanation.choice.variant), None)
    own_s, best_s = _seconds(own, best)
    if own_s is None or best_s is None or best is None or kind.is_ordered or best_s > _WORTH_IT * own_s:
        return RanCalls(times, own_s)
    return RanCalls(times, own_s, best.in_order, times.median_s * best_s / own_s)


def _candidate(explanation: Explanation, algorithm: str) -> Candidate | None:
    """Return the candidate of an algorithm as dumps name it, which is without its segments."""
    try:
        name = parsed(algorithm).algorithm
    except ValueError:
        return None
    named = [each for each in explanation.candidates if each.algorithm == name]
    return next((each for each in named if each.variant == algorithm), named[0] if named else None)


def _seconds(own: Candidate | None, best: Candidate | None) -> tuple[float | None, float | None]:
    """Return the times of two candidates: both measured, or else both predicted."""
    if own is None or best is None:
        return None, None
    if own.measured_s is not None and best.measured_s is not None:
        return own.measured_s, best.measured_s
    return own.predicted_s, best.predicted_s


def shown_calls(rows: Sequence[RanCalls], job: str) -> Table:
    """Return a table of the calls of a job for people."""
    shown = Table(title=f"Calls of job {job}")
    for heading in ("collective", "size", "ranks"):
        shown.add_column(heading, justify="left" if heading == "collective" else "right")
    add_names(shown, "algorithm", [row.times.kind.algorithm for row in rows])
    for heading in ("calls", "measured µs", "predicted µs"):
        shown.add_column(heading, justify="right")
    add_names(shown, "faster", [row.best for row in rows])
    for heading in ("expected µs", "gain ms"):
        shown.add_column(heading, justify="right")
    for row in rows:
        kind = row.times.kind
        call = (kind.collective, format_size(kind.nbytes), str(sum(map(len, kind.hosts))), kind.algorithm)
        gain = f"{row.gain_s * 1e3:.1f}" if row.best else ""
        measured = (str(row.times.calls), _us(row.times.median_s), _us(row.predicted_s))
        shown.add_row(*call, *measured, row.best, _us(row.best_s), gain)
    return shown


def advice(rows: Sequence[RanCalls]) -> str:
    """Return a sentence about the calls that would gain."""
    spent_s, gain_s = total_s(row.times for row in rows), sum(row.gain_s for row in rows)
    if not spent_s:
        return "no rank has recorded a collective that all its ranks have ended"
    if not gain_s:
        return "no other algorithm is known to be faster; the option tune finds out by trials"
    return f"by the algorithms in the column faster, these calls would take {gain_s / spent_s:.0%} less time"


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f}"


def as_json(row: RanCalls) -> dict[str, Any]:
    """Return a row as values for JSON."""
    kind = row.times.kind._asdict()
    times = {"calls": row.times.calls, "measured_s": row.times.median_s, "predicted_s": row.predicted_s}
    return {**kind, **times, "faster": row.best, "expected_s": row.best_s, "gain_s": row.gain_s}
