"""Campaigns and the model tried on recorded times: what they would have chosen, and how good that would have been.

    python -m unisono.bench.replay --recorded bench/results/recorded.jsonl

Times of every round, as `bench.regret` keeps them, stand for the machine: a call takes what one of its rounds took,
drawn at random; between two recorded sizes it is interpolated on logarithmic axes. The model is calibrated by the even
rounds of what a calibration would run, single algorithms at every second recorded size, and judged by the odd rounds at
all of them. Campaigns with several seeds get parts of the time that the sweep has taken; their tables are judged at the
recorded sizes, which are not those of the grid.

Nothing runs in parallel here and nothing else disturbs it, so this takes seconds and gives the same numbers everywhere.
What it cannot know is how times differ from one job to the next, and parameters, which take the default's time.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from unisono.algorithms.catalogue.variants import parsed
from unisono.bench.judgement import Point, of_model
from unisono.bench.regret import RESULTS, RUN_S
from unisono.bench.statistics import usual_s
from unisono.program import begin
from unisono.tuning.decide.choice import Question, TunerState, explain
from unisono.tuning.decide.table import compiled
from unisono.tuning.machine.parameters import PRIORS, between
from unisono.tuning.measure.calibrate import calibrate_calls, calibrate_rounds, with_rounds
from unisono.tuning.measure.campaign import Campaign, PlacementWait, Settings
from unisono.tuning.measure.measurement_log import Measurement

# Of four ranks on two cores that did nothing else.
RECORDED = RESULTS.with_name("recorded.jsonl")

_GRID = [8 * 4**power for power in range(11)]
_FEWEST, _MOST = 3, 256
# What the barrier before each call takes, and the exchange of times after a run.
_BARRIER_S, _EXCHANGE_S = 12e-6, 60e-6


class Recorded:
    """The times of one place: seconds of each round, by collective, bytes and variant; see `tuning.campaign.Trials`."""

    def __init__(
        self,
        transport: str,
        ranks: int,
        crowd: float,
        times_s: Mapping[str, Mapping[int, Mapping[str, list[float]]]],
    ) -> None:
        self.transport, self.ranks, self.crowd, self.times_s = transport, ranks, crowd, times_s
        self.known = TunerState(machine="recorded")
        self._draw = random.Random(0)

    def seed(self, seed: int) -> None:
        """Begin a new sequence of draws."""
        self._draw = random.Random(seed)

    def question(self, collective: str, nbytes: int) -> Question:
        """Return what is asked about such calls."""
        return Question(collective, nbytes, self.ranks, self.transport, crowd=self.crowd)

    def nbytes(self, collective: str, nbytes: int) -> int:
        """Return the nearest size of equal shares."""
        unit = 4 * self.ranks
        return max(1, -(-nbytes // unit)) * unit

    def prepare(self, collective: str, nbytes: int, variant: str) -> str | None:
        """Return None, or that the algorithm was not recorded at all sizes."""
        name = parsed(variant).algorithm
        return None if all(name in found for found in self.times_s[collective].values()) else "was not recorded"

    def typical_s(self, collective: str, nbytes: int, algorithm: str) -> float:
        """Return the median of the rounds, between recorded sizes on the line through both."""
        sizes = sorted(self.times_s[collective])
        low = max((each for each in sizes if each <= nbytes), default=sizes[0])
        high = min((each for each in sizes if each >= nbytes), default=sizes[-1])
        below, above = (median(self.times_s[collective][each][algorithm]) for each in (low, high))
        if low == high:
            return below * max(1.0, nbytes / low)
        return between(nbytes, (low, below), (high, above))

    def run(self, collective: str, nbytes: int, variant: str) -> tuple[list[float], float]:
        """Return calls as long as in one of the recorded rounds, and the seconds of the run."""
        name = parsed(variant).algorithm
        nearest = min(self.times_s[collective], key=lambda each: abs(math.log(each / nbytes)))
        rounds = self.times_s[collective][nearest][name]
        usual_s = self.typical_s(collective, nbytes, name)
        call_s = usual_s * self._draw.choice(rounds) / median(rounds)
        return [call_s], _run_s(call_s, usual_s)

    def await_placement(self, wanted: str, most_s: float) -> PlacementWait:
        """Return that it was not recorded."""
        return PlacementWait("", 0.0, 0.0)

    def sweep_s(self) -> float:
        """Return the seconds that measuring everything in all rounds takes."""
        each = (times for found in self.times_s.values() for row in found.values() for times in row.values())
        return sum(_run_s(call_s, median(times)) for times in each for call_s in times)

    def calibrate(self) -> None:
        """Know what rounds and calls cost, by the recorded collectives that a calibration runs."""

        def time_s(collective: str, name: str, nbytes: int) -> float:
            return usual_s(self.times_s[collective][max(nbytes, sizes[0])][name][::2])

        sizes = sorted(self.times_s["allgather"])
        found = calibrate_rounds(time_s, self.ranks, self.ranks, [nbytes // self.ranks for nbytes in sizes])
        algorithms = {each: sorted(set.intersection(*map(set, rows.values()))) for each, rows in self.times_s.items()}
        found = found._replace(calls=calibrate_calls(time_s, algorithms, sizes[::2]))
        self.known = TunerState(None, with_rounds(PRIORS, self.transport, found), "recorded")


def _run_s(call_s: float, usual_s: float) -> float:
    return max(_FEWEST, min(_MOST, round(RUN_S / usual_s))) * (call_s + _BARRIER_S) + _EXCHANGE_S


def read(path: Path) -> list[Recorded]:
    """Return the places whose times are in a file of `bench.regret`, the variants without parameters of them."""
    places: dict[tuple[str, int, float], dict[str, dict[int, dict[str, list[float]]]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        times = {name: [us / 1e6 for us in found] for name, found in row["times_us"].items() if "(" not in name}
        crowd = max(1.0, row["ranks"] / row["cores"])
        places.setdefault((row["transport"], row["ranks"], crowd), {}).setdefault(row["collective"], {})[
            row["nbytes"]
        ] = times
    return [Recorded(*place, found) for place, found in places.items()]


def regrets(recorded: Recorded, budget_s: float, seed: int) -> list[float]:
    """Return the regret at each recorded point of the table that a campaign makes."""
    recorded.seed(seed)
    kept = list[Measurement]()
    settings = Settings(list(recorded.times_s), _GRID, budget_s, {"machine": "recorded"}, seed)
    Campaign(recorded, settings, kept.extend, lambda *_: None).run()
    decisions = {context.collective: decision for context, decision in compiled(kept).decisions.items()}
    found = list[float]()
    for collective, rows in recorded.times_s.items():
        for nbytes, times in rows.items():
            usual = {name: median(rounds) for name, rounds in times.items()}
            chosen = parsed(str(decisions[collective].variant_at(nbytes))).algorithm
            found.append(usual[chosen] / min(usual.values()))
    return found


def predictions(recorded: Recorded) -> list[Point]:
    """Return the recorded points, their odd rounds, with what the model predicts of what it chooses among."""
    points = list[Point]()
    for collective, rows in recorded.times_s.items():
        for nbytes, times in rows.items():
            said = explain(recorded.question(collective, nbytes), recorded.known).candidates
            able = {each.variant: each.predicted_s for each in said if each.refusal is None and each.predicted_s}
            judging = {name: rounds[1::2] for name, rounds in times.items()}
            points.append(Point(recorded.transport, collective, nbytes, judging, {}, able))
    return points


def shown(recorded: Recorded, parts: Sequence[float], seeds: int) -> Table:
    """Return the table of regrets by the part of the sweep's time that a campaign has had."""
    table = Table(title=f"{recorded.ranks} ranks, {recorded.transport}: regret of tables")
    for heading in ("of the sweep's time", "geometric mean", "p90", "max"):
        table.add_column(heading, justify="right")
    for part in parts:
        found = [each for seed in range(seeds) for each in regrets(recorded, part * recorded.sweep_s(), seed)]
        numbers = geometric_mean(found), float(np.quantile(found, 0.9)), max(found)
        table.add_row(f"{part:.0%}", *(f"{number:.3f}" for number in numbers))
    return table


@click.command()
@click.option("--recorded", "path", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=RECORDED)
@click.option("--seeds", type=click.IntRange(min=1), default=8, show_default=True, help="Campaigns for each budget.")
def main(path: Path, seeds: int) -> None:
    """Show how good choices would have been where times were recorded."""
    console = Console()
    for recorded in read(path):
        recorded.calibrate()
        console.print(shown(recorded, (0.1, 0.15, 0.25), seeds))
        console.print(of_model(predictions(recorded)), highlight=False)


if __name__ == "__main__":
    begin()
    main()
