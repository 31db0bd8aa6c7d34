"""Measures how well algorithms are chosen at unmeasured numbers of ranks, on measurements of a real cluster.

    unisono bench selection --data leonardo_collectives.csv [--out bench/results/selection.jsonl] [--json]

The data is a CSV file of medians, such as PICO publishes, with the columns coll, p, tasks_per_node, count_int32,
timestamp, test, lib, algo and median_us. Each number of ranks is held out in turn: its times are predicted from those
of other numbers of ranks, of the same collective. These ways of choosing are compared on the same points:

- the library's own choice (`default_ompi`);
- the model of steps (`rank_interpolation.Steps`), with the closed forms of equivalent algorithms of Unisono;
- the interpolation of measurements (`rank_interpolation.Interpolation`), which needs no algorithm;
- both combined;
- predict, then measure: the best of the algorithms that are predicted to be near the best. The table also shows the
  time of these measurements as a part of the time of measuring all algorithms.

Two constants do not come from the data: the widths of the interpolation, and the margin of "near the best". They are
chosen for each collective by the other collectives.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from unisono.algorithms.catalogue.algorithm import Cost
from unisono.algorithms.catalogue.registry import ALGORITHMS
from unisono.errors import UsageError
from unisono.foundation.program import begin
from unisono.tuning.decide.rank_interpolation import (
    Interpolation,
    MeasuredPoint,
    Predictions,
    Round,
    Steps,
    Widths,
    combined,
    regret,
    survivors,
)

DEFAULT = "default_ompi"
COLUMNS = ("coll", "p", "tasks_per_node", "count_int32", "timestamp", "test", "lib", "algo", "median_us")
NAMES = {"BCAST": "broadcast"}

# For algorithms of the library, by the beginnings of their names, an algorithm of Unisono with as many rounds and
# bytes; the first match counts. Bine trees have the rounds and bytes of the doubling and halving that they replace
# (arXiv 2508.17311).
ALIKE = {
    "allreduce": {
        "ring": "ring",
        "recursive_doubling": "recursive_doubling",
        "bine_lat": "recursive_doubling",
        "rabenseifner": "rabenseifner",
        "bine": "rabenseifner",
        "allgather_reduce": "direct",
    },
    "allgather": {
        "ring": "ring",
        "neighbor": "neighbour_exchange",
        "recursive_doubling": "circulant",
        "bine": "circulant",
        "k_bruck": "bruck",
        "sparbit": "circulant",
    },
    "reduce_scatter": {"ring": "ring", "recursive_": "circulant", "bine": "circulant"},
}

WIDTHS = [Widths(ranks, nbytes, power_of_two=power) for ranks, nbytes, power in product((1, 2), (1, 2), (0.25, 0.5))]
MARGINS = tuple(1.0 + step / 50 for step in range(1, 51))
TIME_SHARE = 0.44


class PredictedPoint(NamedTuple):
    """A point predicted from other numbers of ranks: the times of all algorithms, and of the library's own choice."""

    point: MeasuredPoint
    seconds: dict[str, float]
    default_s: float | None
    by_steps: Predictions
    by_widths: tuple[Predictions, ...]

    def both(self, at: int) -> Predictions:
        """Return the combined prediction of both models, with the interpolation of `WIDTHS[at]`."""
        return combined([self.by_widths[at], self.by_steps])


class Score(NamedTuple):
    """The cost of a way of choosing: the ratio of its times to the best times, and its part of the measuring time."""

    name: str
    points: int
    geomean: float
    p90: float
    most: float
    within_5_percent: float
    time_share: float | None = None


def cost_of(collective: str, name: str, size: int) -> Cost | None:
    """Return the closed form of an algorithm of the library, if Unisono has an equivalent one."""
    alike = next((own for start, own in ALIKE.get(collective, {}).items() if name.startswith(start)), None)
    return None if alike is None else ALGORITHMS[collective][alike].cost_of(size, {})


class Measurement(NamedTuple):
    """A row of the file: a job with its test, a point, the library, its algorithm, and the median time."""

    job: tuple[str, str]
    point: MeasuredPoint
    library: str
    algorithm: str
    seconds: float


def measurements(path: Path) -> Iterator[Measurement]:
    """Yield the rows of a file.

    Raises:
        UsageError: the file cannot be read, lacks a column, or has an invalid row; names the line.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if lacking := [name for name in COLUMNS if name not in (reader.fieldnames or ())]:
                raise UsageError(f"{path} has no column {lacking[0]!r}: it needs {', '.join(COLUMNS)}")
            for row in reader:
                try:
                    size, per_host, count = (int(row[name]) for name in ("p", "tasks_per_node", "count_int32"))
                    median_us = float(row["median_us"])
                except (TypeError, ValueError):
                    raise UsageError(f"{path}, line {reader.line_num}: expected whole numbers and a time") from None
                point = MeasuredPoint(NAMES.get(row["coll"], row["coll"].lower()), 4 * count, size, per_host)
                job = (row["timestamp"], row["test"])
                yield Measurement(job, point, row["lib"], row["algo"], median_us * 1e-6)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def read(path: Path) -> list[tuple[Round, float | None]]:
    """Return the rounds of a file with at least two algorithms, and the time of the library's own choice in each.

    Raises:
        UsageError: as `measurements`.
    """
    by_round: defaultdict[Any, dict[str, list[float]]] = defaultdict(dict)
    for job, point, library, algorithm, seconds in measurements(path):
        by_round[job, point, library].setdefault(algorithm, []).append(seconds)
    rounds = []
    for (_, point, _), times in by_round.items():
        middle = {name: float(np.median(of_name)) for name, of_name in times.items()}
        default_s = middle.pop(DEFAULT, None)
        if len(middle) > 1:
            rounds.append((Round(point, middle), default_s))
    return rounds


def outcomes(rounds: Sequence[tuple[Round, float | None]]) -> Iterator[PredictedPoint]:
    """Yield every point of collectives measured on several numbers of ranks, predicted without its own number."""
    held = sorted({(each.point.collective, each.point.size) for each, _ in rounds})
    for collective, size in track(held, description="holding out", console=Console(stderr=True), transient=True):
        others = [each for each, _ in rounds if each.point.collective == collective and each.point.size != size]
        if not others:
            continue
        steps = Steps(others, cost_of)
        interpolations = [Interpolation(others, widths) for widths in WIDTHS]
        for (point, seconds), default_s in rounds:
            if (point.collective, point.size) == (collective, size):
                names = list(seconds)
                by_widths = tuple(each.predict(point, names) for each in interpolations)
                if by_widths[0]:
                    yield PredictedPoint(point, dict(seconds), default_s, steps.predict(point, names), by_widths)


def chosen_elsewhere(all_outcomes: Sequence[PredictedPoint]) -> dict[str, tuple[int, float]]:
    """Return, for each collective, the number of the widths and the margin that are best on the other collectives."""
    best = {}
    for collective in {each.point.collective for each in all_outcomes}:
        others = [each for each in all_outcomes if each.point.collective != collective] or list(all_outcomes)
        regrets = [geomean(_regret(each.both(at), each) for each in others) for at in range(len(WIDTHS))]
        at = regrets.index(min(regrets))
        fitting = [margin for margin in MARGINS if _time_share(others, at, margin) <= TIME_SHARE]
        best[collective] = (at, max(fitting, default=MARGINS[0]))
    return best


def scores(all_outcomes: Sequence[PredictedPoint]) -> list[Score]:
    """Return the cost of each way of choosing, on the same points."""
    constants = chosen_elsewhere(all_outcomes)
    measured, shares = [], []
    for outcome in all_outcomes:
        at, margin = constants[outcome.point.collective]
        near = survivors(outcome.both(at), list(outcome.seconds), margin)
        measured.append(min(outcome.seconds[name] for name in near) / min(outcome.seconds.values()))
        shares.append(_time_share([outcome], at, margin))
    with_default = [each for each in all_outcomes if each.default_s is not None]
    defaults = [float(each.default_s or 0.0) / min(each.seconds.values()) for each in with_default]
    by_interpolation = [_regret(each.by_widths[constants[each.point.collective][0]], each) for each in all_outcomes]
    return [
        _score("the library's own choice", defaults),
        _score("steps (PLogP-like)", [_regret(each.by_steps, each) for each in all_outcomes if each.by_steps]),
        _score("interpolation", by_interpolation),
        _score("both", [_regret(each.both(constants[each.point.collective][0]), each) for each in all_outcomes]),
        _score("both, then measuring", measured)._replace(time_share=float(np.mean(shares))),
    ]


def geomean(values: Iterable[float]) -> float:
    """Return the geometric mean."""
    return math.exp(float(np.mean([math.log(value) for value in values])))


def _regret(predicted: Predictions, each: PredictedPoint) -> float:
    return regret(min(predicted, key=predicted.__getitem__), each.seconds)


def _time_share(points: Sequence[PredictedPoint], at: int, margin: float) -> float:
    """Return the mean part of the time of measuring that goes to the algorithms nearly as fast as the best one."""
    near = [survivors(each.both(at), list(each.seconds), margin) for each in points]
    both = zip(points, near, strict=True)
    return float(np.mean([sum(each.seconds[name] for name in of) / sum(each.seconds.values()) for each, of in both]))


def _score(name: str, values: Sequence[float]) -> Score:
    if not values:
        return Score(name, 0, math.nan, math.nan, math.nan, math.nan)
    within = float(np.mean(np.array(values) <= 1.05))
    return Score(name, len(values), geomean(values), float(np.quantile(values, 0.9)), max(values), within)


def table(title: str, all_scores: Sequence[Score]) -> Table:
    """Return the scores as a table for people."""
    shown = Table(title=title)
    for heading in ("", "points", "geomean", "p90", "max", "within 5 %", "time of measuring all"):
        shown.add_column(heading, justify="right" if heading else "left")
    for score in all_scores:
        numbers = [f"{value:.3f}" for value in score[2:5]]
        share = "" if score.time_share is None else f"{score.time_share:.0%}"
        shown.add_row(score.name, str(score.points), *numbers, f"{score.within_5_percent:.0%}", share)
    return shown


def records(candidates: str, all_outcomes: Sequence[PredictedPoint]) -> Iterator[dict[str, Any]]:
    """Yield the record of each point for the output file."""
    constants = chosen_elsewhere(all_outcomes)
    for outcome in all_outcomes:
        at, margin = constants[outcome.point.collective]
        best_s = min(outcome.seconds.values())
        yield {
            "candidates": candidates,
            **outcome.point._asdict(),
            "best": min(outcome.seconds, key=outcome.seconds.__getitem__),
            "widths": WIDTHS[at]._asdict(),
            "margin": margin,
            "regret_interpolation": _regret(outcome.by_widths[at], outcome),
            "regret_steps": _regret(outcome.by_steps, outcome) if outcome.by_steps else None,
            "regret_both": _regret(outcome.both(at), outcome),
            "regret_default": None if outcome.default_s is None else outcome.default_s / best_s,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate the data, show the scores and write the output file; exit code 2 if the data cannot be used."""
    parser = argparse.ArgumentParser(prog="unisono bench selection", description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="CSV file of measurements")
    parser.add_argument("--out", type=Path, help="file for a line of JSON for each point")
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    options = parser.parse_args(arguments)
    try:
        rounds = read(options.data)
    except UsageError as error:
        parser.error(str(error))
    own = [(each._replace(seconds=_own(each)), default_s) for each, default_s in rounds if len(_own(each)) > 1]
    results = {"the library's own algorithms": list(outcomes(own)), "all algorithms": list(outcomes(rounds))}
    if options.out:
        lines = [json.dumps(record) for name, points in results.items() for record in records(name, points)]
        options.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    if options.json:
        shown = {name: [score._asdict() for score in scores(points)] for name, points in results.items()}
        sys.stdout.write(f"{json.dumps(shown)}\n")
        return 0
    console = Console() if sys.stdout.isatty() else Console(width=120)
    for name, of_name in results.items():
        console.print(table(f"time of the choice ÷ time of the best of {name}, ranks held out", scores(of_name)))
    return 0


def _own(each: Round) -> dict[str, float]:
    return {name: seconds for name, seconds in each.seconds.items() if name.endswith("_ompi")}


if __name__ == "__main__":
    begin()
    sys.exit(main())
