"""How well algorithms are chosen at numbers of ranks that were not measured, on measurements of a real cluster.

    python -m unisono.bench.selection --data leonardo_collectives.csv [--out bench/results/selection.jsonl] [--json]

The data is a CSV file of medians with the columns coll, p, tasks_per_node, count_int32, timestamp, test, lib, algo and
median_us, such as PICO publishes. Each number of ranks is held out in turn: what was measured on it is predicted from
what was measured on others, of the same collective. Then are compared, on the same points:

- the library's own choice (`default_ompi`);
- the model of steps (`tuning.selection.Steps`), with the closed forms of Unisono's algorithms that are alike;
- the interpolation of what was measured (`tuning.selection.Interpolation`), which knows no algorithm;
- both combined;
- the best of those that are so predicted to be near the best (predict, then measure), and how much of the time of
  measuring all of them that takes.

The constants that are not given by the data (the widths of the interpolation, the margin of what is measured) are
chosen for each collective on the other ones.
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
from unisono.program import begin
from unisono.tuning.decide.rank_interpolation import (
    Interpolation,
    Point,
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

# Which algorithms of Unisono take as many rounds and bytes as those of the library, by how their names begin; the first
# that fits. Bine trees have the rounds and bytes of the doubling and halving that they replace (arXiv 2508.17311).
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


class Outcome(NamedTuple):
    """A point, predicted from other numbers of ranks: the times of each algorithm, and of the library's own choice."""

    point: Point
    seconds: dict[str, float]
    default_s: float | None
    by_steps: Predictions
    by_widths: tuple[Predictions, ...]

    def both(self, at: int) -> Predictions:
        """Return what both models predict together, by widths of that number."""
        return combined([self.by_widths[at], self.by_steps])


class Score(NamedTuple):
    """What choosing costs: the time of what is chosen by that of the best, over points; the share of time measuring."""

    name: str
    points: int
    geomean: float
    p90: float
    most: float
    within_5_percent: float
    time_share: float | None = None


def cost_of(collective: str, name: str, size: int) -> Cost | None:
    """Return the closed form of an algorithm of the library, if one of Unisono's is alike."""
    alike = next((own for start, own in ALIKE.get(collective, {}).items() if name.startswith(start)), None)
    return None if alike is None else ALGORITHMS[collective][alike].cost_of(size, {})


def read(path: Path) -> list[tuple[Round, float | None]]:
    """Return the rounds of a file with at least two algorithms, and the time of the library's own choice in each.

    Raises:
        UsageError: it cannot be read, lacks a column, or has a row that is no measurement; names the line.
    """
    found: defaultdict[tuple[str, ...], dict[str, list[float]]] = defaultdict(dict)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if lacking := [name for name in COLUMNS if name not in (reader.fieldnames or ())]:
                raise UsageError(f"{path} has no column {lacking[0]!r}: it needs {', '.join(COLUMNS)}")
            for row in reader:
                try:
                    numbers = tuple(str(int(row[name])) for name in ("p", "tasks_per_node", "count_int32"))
                    median_us = float(row["median_us"])
                except (TypeError, ValueError):
                    raise UsageError(f"{path}, line {reader.line_num}: it is no measurement") from None
                key = (row["coll"], *numbers, row["timestamp"], row["test"], row["lib"])
                found[key].setdefault(row["algo"], []).append(median_us * 1e-6)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    rounds = []
    for (coll, size, per_host, count, *_), times in found.items():
        middle = {name: float(np.median(of_name)) for name, of_name in times.items()}
        default_s = middle.pop(DEFAULT, None)
        point = Point(NAMES.get(coll, coll.lower()), 4 * int(count), int(size), int(per_host))
        if len(middle) > 1:
            rounds.append((Round(point, middle), default_s))
    return rounds


def outcomes(rounds: Sequence[tuple[Round, float | None]]) -> Iterator[Outcome]:
    """Yield every point of collectives that were measured on several numbers of ranks, with its number held out."""
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
                    yield Outcome(point, dict(seconds), default_s, steps.predict(point, names), by_widths)


def chosen_elsewhere(found: Sequence[Outcome]) -> dict[str, tuple[int, float]]:
    """Return, for each collective, the number of the widths and the margin that are best on all other ones."""
    best = {}
    for collective in {each.point.collective for each in found}:
        others = [each for each in found if each.point.collective != collective] or list(found)
        regrets = [geomean(_regret(each.both(at), each) for each in others) for at in range(len(WIDTHS))]
        at = regrets.index(min(regrets))
        fitting = [margin for margin in MARGINS if _time_share(others, at, margin) <= TIME_SHARE]
        best[collective] = (at, max(fitting, default=MARGINS[0]))
    return best


def scores(found: Sequence[Outcome]) -> list[Score]:
    """Return what each way of choosing costs on the same points."""
    constants = chosen_elsewhere(found)
    measured, shares = [], []
    for each in found:
        at, margin = constants[each.point.collective]
        near = survivors(each.both(at), list(each.seconds), margin)
        measured.append(min(each.seconds[name] for name in near) / min(each.seconds.values()))
        shares.append(_time_share([each], at, margin))
    with_default = [each for each in found if each.default_s is not None]
    defaults = [float(each.default_s or 0.0) / min(each.seconds.values()) for each in with_default]
    by_interpolation = [_regret(each.by_widths[constants[each.point.collective][0]], each) for each in found]
    return [
        _score("the library's own choice", defaults),
        _score("steps (PLogP-like)", [_regret(each.by_steps, each) for each in found if each.by_steps]),
        _score("interpolation", by_interpolation),
        _score("both", [_regret(each.both(constants[each.point.collective][0]), each) for each in found]),
        _score("both, then measuring", measured)._replace(time_share=float(np.mean(shares))),
    ]


def geomean(values: Iterable[float]) -> float:
    """Return the geometric mean."""
    return math.exp(float(np.mean([math.log(value) for value in values])))


def _regret(predicted: Predictions, each: Outcome) -> float:
    return regret(min(predicted, key=predicted.__getitem__), each.seconds)


def _time_share(found: Sequence[Outcome], at: int, margin: float) -> float:
    """Return how much of the time of measuring all is taken by those near the best, on average over points."""
    near = [survivors(each.both(at), list(each.seconds), margin) for each in found]
    both = zip(found, near, strict=True)
    return float(np.mean([sum(each.seconds[name] for name in of) / sum(each.seconds.values()) for each, of in both]))


def _score(name: str, values: Sequence[float]) -> Score:
    if not values:
        return Score(name, 0, math.nan, math.nan, math.nan, math.nan)
    within = float(np.mean(np.array(values) <= 1.05))
    return Score(name, len(values), geomean(values), float(np.quantile(values, 0.9)), max(values), within)


def table(title: str, found: Sequence[Score]) -> Table:
    """Return the scores as people read them."""
    shown = Table(title=title)
    for heading in ("", "points", "geomean", "p90", "max", "within 5 %", "time of measuring all"):
        shown.add_column(heading, justify="right" if heading else "left")
    for each in found:
        numbers = [f"{value:.3f}" for value in each[2:5]]
        share = "" if each.time_share is None else f"{each.time_share:.0%}"
        shown.add_row(each.name, str(each.points), *numbers, f"{each.within_5_percent:.0%}", share)
    return shown


def records(candidates: str, found: Sequence[Outcome]) -> Iterator[dict[str, Any]]:
    """Yield what is kept of each point."""
    constants = chosen_elsewhere(found)
    for each in found:
        at, margin = constants[each.point.collective]
        yield {
            "candidates": candidates,
            **each.point._asdict(),
            "best": min(each.seconds, key=each.seconds.__getitem__),
            "widths": WIDTHS[at]._asdict(),
            "margin": margin,
            "regret_interpolation": _regret(each.by_widths[at], each),
            "regret_steps": _regret(each.by_steps, each) if each.by_steps else None,
            "regret_both": _regret(each.both(at), each),
            "regret_default": None if each.default_s is None else each.default_s / min(each.seconds.values()),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate, show and keep; 2 if the data cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m unisono.bench.selection", description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="CSV file of measurements")
    parser.add_argument("--out", type=Path, help="file for a line of JSON for each point")
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    asked = parser.parse_args(arguments)
    try:
        rounds = read(asked.data)
    except UsageError as error:
        parser.error(str(error))
    own = [(each._replace(seconds=_own(each)), default_s) for each, default_s in rounds if len(_own(each)) > 1]
    results = {"the library's own algorithms": list(outcomes(own)), "all algorithms": list(outcomes(rounds))}
    if asked.out:
        lines = [json.dumps(record) for name, found in results.items() for record in records(name, found)]
        asked.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    if asked.json:
        shown = {name: [score._asdict() for score in scores(found)] for name, found in results.items()}
        sys.stdout.write(f"{json.dumps(shown)}\n")
        return 0
    console = Console() if sys.stdout.isatty() else Console(width=120)
    for name, found in results.items():
        console.print(table(f"time of what is chosen ÷ time of the best of {name}, ranks held out", scores(found)))
    return 0


def _own(each: Round) -> dict[str, float]:
    return {name: seconds for name, seconds in each.seconds.items() if name.endswith("_ompi")}


if __name__ == "__main__":
    begin()
    sys.exit(main())
