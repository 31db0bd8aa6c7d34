"""Tests campaigns and the model on recorded times: shows their choices, and how good these would have been.

    unisono bench replay --recorded bench/results/recorded.jsonl

The times of every round, from `unisono bench regret`, stand for the machine. A simulated call takes the time of a
random round; between two recorded sizes, times are interpolated on logarithmic axes.

The model is calibrated by the even rounds of single algorithms at every second recorded size, as a calibration would
run them. It is scored by the odd rounds at all sizes. Campaigns with several seeds get parts of the time of the sweep.
Their tables are scored at the recorded sizes, which are not those of the grid.

This takes seconds and gives the same numbers everywhere, because nothing runs in parallel and no other load disturbs
it. It cannot show how times differ from job to job. Parameters of algorithms have no effect: their times are the
default's.
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
from unisono.bench.statistics import usual_s
from unisono.bench.studies.judgement import SizeTimes, of_model
from unisono.bench.studies.regret import RESULTS, RUN_S
from unisono.foundation.program import begin
from unisono.tuning.decide.choice import Question, TunerState, explain
from unisono.tuning.decide.table import compiled
from unisono.tuning.machine.parameters import PRIORS, between
from unisono.tuning.measure.calibrate import calibrate_calls, calibrate_rounds, with_rounds
from unisono.tuning.measure.campaign import Campaign, PlacementWait, Settings
from unisono.tuning.measure.measurement_log import Measurement

# Recorded with four ranks on two cores without other load.
RECORDED = RESULTS.with_name("recorded.jsonl")

_GRID = [8 * 4**power for power in range(11)]
_FEWEST, _MOST = 3, 256
# The time of the barrier before each call, and of the exchange of times after a run.
_BARRIER_S, _EXCHANGE_S = 12e-6, 60e-6


class Recorded:
    """The times of one place: seconds of each round, by collective, bytes and variant. Implements `Trials`."""

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
        """Return the question to the tuner about calls of `collective` with `nbytes`."""
        return Question(collective, nbytes, self.ranks, self.transport, crowd=self.crowd)

    def nbytes(self, collective: str, nbytes: int) -> int:
        """Return the nearest size of equal shares."""
        unit = 4 * self.ranks
        return max(1, -(-nbytes // unit)) * unit

    def prepare(self, collective: str, nbytes: int, variant: str) -> str | None:
        """Return None, or the reason that the algorithm was not recorded at all sizes."""
        name = parsed(variant).algorithm
        return None if all(name in row for row in self.times_s[collective].values()) else "was not recorded"

    def typical_s(self, collective: str, nbytes: int, algorithm: str) -> float:
        """Return the median of the recorded seconds. Between two sizes, interpolate on the line through both."""
        sizes = sorted(self.times_s[collective])
        low = max((each for each in sizes if each <= nbytes), default=sizes[0])
        high = min((each for each in sizes if each >= nbytes), default=sizes[-1])
        below, above = (median(self.times_s[collective][each][algorithm]) for each in (low, high))
        if low == high:
            return below * max(1.0, nbytes / low)
        return between(nbytes, (low, below), (high, above))

    def run(self, collective: str, nbytes: int, variant: str) -> tuple[list[float], float]:
        """Return the time of a call as in a random recorded round, and the seconds of the run."""
        name = parsed(variant).algorithm
        nearest = min(self.times_s[collective], key=lambda each: abs(math.log(each / nbytes)))
        rounds = self.times_s[collective][nearest][name]
        usual_s = self.typical_s(collective, nbytes, name)
        call_s = usual_s * self._draw.choice(rounds) / median(rounds)
        return [call_s], _run_s(call_s, usual_s)

    def await_placement(self, required: str, most_s: float) -> PlacementWait:
        """Return an unknown placement, because it was not recorded."""
        return PlacementWait("", 0.0, 0.0)

    def sweep_s(self) -> float:
        """Return the seconds of measuring everything in all rounds."""
        series = (times for rows in self.times_s.values() for row in rows.values() for times in row.values())
        return sum(_run_s(call_s, median(times)) for times in series for call_s in times)

    def calibrate(self) -> None:
        """Learn the costs of rounds and calls from the recorded collectives that a calibration runs."""

        def time_s(collective: str, name: str, nbytes: int) -> float:
            return usual_s(self.times_s[collective][max(nbytes, sizes[0])][name][::2])

        sizes = sorted(self.times_s["allgather"])
        rounds = calibrate_rounds(time_s, self.ranks, self.ranks, [nbytes // self.ranks for nbytes in sizes])
        algorithms = {each: sorted(set.intersection(*map(set, rows.values()))) for each, rows in self.times_s.items()}
        rounds = rounds._replace(calls=calibrate_calls(time_s, algorithms, sizes[::2]))
        self.known = TunerState(None, with_rounds(PRIORS, self.transport, rounds), "recorded")


def _run_s(call_s: float, usual_s: float) -> float:
    return max(_FEWEST, min(_MOST, round(RUN_S / usual_s))) * (call_s + _BARRIER_S) + _EXCHANGE_S


def read(path: Path) -> list[Recorded]:
    """Return the places in a file of `unisono bench regret`, with the times of variants without parameters."""
    places: dict[tuple[str, int, float], dict[str, dict[int, dict[str, list[float]]]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        times = {name: [us / 1e6 for us in series] for name, series in row["times_us"].items() if "(" not in name}
        crowd = max(1.0, row["ranks"] / row["cores"])
        places.setdefault((row["transport"], row["ranks"], crowd), {}).setdefault(row["collective"], {})[
            row["nbytes"]
        ] = times
    return [Recorded(*place, rows) for place, rows in places.items()]


def regrets(recorded: Recorded, budget_s: float, seed: int) -> list[float]:
    """Return the regret, at each recorded point, of the table of a campaign."""
    recorded.seed(seed)
    kept = list[Measurement]()
    settings = Settings(list(recorded.times_s), _GRID, budget_s, {"machine": "recorded"}, seed)
    Campaign(recorded, settings, kept.extend, lambda *_: None).run()
    decisions = {context.collective: decision for context, decision in compiled(kept).decisions.items()}
    ratios = list[float]()
    for collective, rows in recorded.times_s.items():
        for nbytes, times in rows.items():
            usual = {name: median(rounds) for name, rounds in times.items()}
            chosen = parsed(str(decisions[collective].variant_at(nbytes))).algorithm
            ratios.append(usual[chosen] / min(usual.values()))
    return ratios


def predictions(recorded: Recorded) -> list[SizeTimes]:
    """Return, for each recorded point, the times of every second round and the times that the model predicts."""
    points = list[SizeTimes]()
    for collective, rows in recorded.times_s.items():
        for nbytes, times in rows.items():
            candidates = explain(recorded.question(collective, nbytes), recorded.known).candidates
            able = {each.variant: each.predicted_s for each in candidates if each.refusal is None and each.predicted_s}
            judging = {name: rounds[1::2] for name, rounds in times.items()}
            points.append(SizeTimes(recorded.transport, collective, nbytes, judging, {}, able))
    return points


def shown(recorded: Recorded, parts: Sequence[float], seeds: int) -> Table:
    """Return a table of regrets by the time of a campaign, as a part of the time that measuring everything takes."""
    table = Table(title=f"{recorded.ranks} ranks, {recorded.transport}: regret of tables")
    for heading in ("of the sweep's time", "geometric mean", "p90", "max"):
        table.add_column(heading, justify="right")
    for part in parts:
        ratios = [ratio for seed in range(seeds) for ratio in regrets(recorded, part * recorded.sweep_s(), seed)]
        numbers = geometric_mean(ratios), float(np.quantile(ratios, 0.9)), max(ratios)
        table.add_row(f"{part:.0%}", *(f"{number:.3f}" for number in numbers))
    return table


@click.command()
@click.option("--recorded", "path", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=RECORDED)
@click.option("--seeds", type=click.IntRange(min=1), default=8, show_default=True, help="Campaigns for each budget.")
def main(path: Path, seeds: int) -> None:
    """Show how good choices would have been on the recorded times."""
    console = Console()
    for recorded in read(path):
        recorded.calibrate()
        console.print(shown(recorded, (0.1, 0.15, 0.25), seeds))
        console.print(of_model(predictions(recorded)), highlight=False)


if __name__ == "__main__":
    begin()
    main()
