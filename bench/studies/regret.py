"""Measures how good the tuner's choices are, at sizes that it has not seen, next to all other algorithms.

    unisono bench regret -n 4 --budget 11 [--placement near]
    unisono bench regret -n 3 --tuned-ranks 2 --tuned-ranks 4 --budget 11
    sudo unisono bench regret -n 4 --budget 40 --places shaped --rate 1gbit --sizes 24:2M

In each place, `unisono tune` makes a table within the budget. With `--tuned-ranks`, the table is made on other numbers
of ranks, each within the budget. The machine is then calibrated among `-n` ranks, and this calibration decides.

Then, in one job, all algorithms run at sizes between those of the table, in interleaved rounds, one collective after
the other. The model is calibrated before, between and after them. `bench.judgement` explains the scores.

With `--placement`, only races and rounds with that placement from beginning to end count. "shaped" means hosts of
`--per-host` ranks, each a network namespace on a link of the given rate.

The table is compared with the calibrated model alone, with fixed thresholds in the manner of Open MPI's, and with the
fixed choice of Gloo. The command ends after some minutes. The times of every round are appended to
bench/results/regret.jsonl.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import click
from rich.console import Console

from unisono.bench import namespaces
from unisono.bench.sizes import parse_sizes
from unisono.bench.studies.judgement import SizeTimes, of_model, shown
from unisono.errors import UnisonoError
from unisono.foundation.processes import python_command
from unisono.foundation.program import begin
from unisono.transports.host.core_distance import PLACEMENTS

COLLECTIVES = ("allreduce", "allgather", "reduce_scatter", "broadcast")
PLACES = ("shm", "tcp", "shaped")
RANK = Path(__file__).resolve().parent / "regret_rank.py"
RESULTS = Path(__file__).resolve().parents[1] / "results" / "regret.jsonl"
RUN_S = 0.003
# Algorithms that the tuner uses only if they are named, but that are candidates of a campaign.
NAMED = {
    "allreduce": ("balanced_tree", "all_pairs", "one_shot", "two_shot"),
    "allgather": ("read",),
    "reduce_scatter": (),
    "broadcast": ("read",),
}
# The algorithm for vectors below each size: rules of thumb in the manner of Open MPI's "tuned" component, for few
# ranks.
THRESHOLDS: dict[str, tuple[tuple[float, str], ...]] = {
    "allreduce": ((10_000, "recursive_doubling"), (float("inf"), "ring")),
    "allgather": ((81_920, "bruck"), (float("inf"), "ring")),
    "reduce_scatter": ((12_288, "recursive_halving"), (float("inf"), "ring")),
    "broadcast": ((2_048, "binomial"), (370_728, "binary"), (float("inf"), "chain")),
}
RINGS = {"allreduce": "ring", "allgather": "ring", "reduce_scatter": "ring", "broadcast": "binomial"}

# Runs a Python program, given as arguments of the interpreter, on all ranks, with more environment variables.
RunRanks: TypeAlias = Callable[[Sequence[str], Mapping[str, str]], None]


class Spent(NamedTuple):
    """The seconds of calibrating (if tables are for other numbers of ranks), of tuning, and of the sweep."""

    calibration_s: float
    tuning_s: float
    sweep_s: float

    def __str__(self) -> str:
        """Return a text for people: the times, and the part of the sweep's time that the choices have cost."""
        calibrated = f"calibrated in {self.calibration_s:.0f} s, " if self.calibration_s else ""
        part = (self.calibration_s or self.tuning_s) / self.sweep_s
        return f"tuned in {self.tuning_s:.0f} s, {calibrated}{part:.0%} of the sweep's {self.sweep_s:.0f} s"


class StudySettings(NamedTuple):
    """The settings of a study, from the command line."""

    ranks: int
    budget_s: float
    grid: str
    sizes: tuple[int, ...]
    rounds: int
    collectives: tuple[str, ...]
    rate: str = ""
    per_host: int = 1
    placement: str = "any"
    tuned_ranks: tuple[int, ...] = ()

    def points(self) -> list[tuple[str, int]]:
        """Return the points to measure, as (collective, bytes). Bytes are a multiple of one element for each rank."""
        unit = 4 * self.ranks
        sizes = sorted({max(1, round(nbytes / unit)) * unit for nbytes in self.sizes})
        return [(collective, nbytes) for collective in self.collectives for nbytes in sizes]


@contextlib.contextmanager
def _ranks(place: str, asked: StudySettings) -> Iterator[RunRanks]:
    """Yield a function that runs the ranks of a place."""
    if place != "shaped":

        def run_here(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
            words = ("run", "-n", str(asked.ranks), "--bind", "core", *arguments)
            command = python_command("from unisono.cli.entry import command; sys.exit(command())", *words)
            settings = {**os.environ, "UNISONO_TRANSPORTS": place, **environ}
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=settings)

        yield run_here
        return
    with namespaces.network(asked.ranks // asked.per_host, asked.rate) as hosts:

        def run_there(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
            namespaces.run_ranks(hosts, asked.per_host, [sys.executable, *arguments], environ, bound=True)

        yield run_there


def study(place: str, asked: StudySettings, folder: Path) -> tuple[list[SizeTimes], Spent]:
    """Tune and sweep one place; return the points, and the time that it took."""
    table, points = folder / f"{place}.json", asked.points()
    settings = ["--sizes", asked.grid, "--placement", asked.placement, "--out", str(table)]
    tune = ["-m", "unisono", "tune", "--force", *settings]
    began = time.monotonic()
    if asked.tuned_ranks:
        with _ranks(place, asked) as run:
            run(["-m", "unisono", "calibrate"], {})
    calibration_s = time.monotonic() - began if asked.tuned_ranks else 0.0
    for ranks in asked.tuned_ranks or (asked.ranks,):
        with _ranks(place, asked._replace(ranks=ranks)) as run:
            run([*tune, "--budget", f"{asked.budget_s}s", "--collectives", ",".join(asked.collectives)], {})
    tuning_s = time.monotonic() - began - calibration_s
    with _ranks(place, asked) as run:
        by_table = answer(run, folder, {"points": points}, {"UNISONO_TABLE": str(table)})
        fixed = [_choices(point, chosen) for point, chosen in zip(points, by_table, strict=True)]
        also = [[*NAMED[name], *dict.fromkeys(named.values())] for (name, _), named in zip(points, fixed, strict=True)]
        request = {"points": points, "also": also, "rounds": asked.rounds, "run_s": RUN_S, "placement": asked.placement}
        answers = answer(run, folder, request, {})
    measured_points = [
        SizeTimes(place, collective, nbytes, measured, {**chosen, "model": by_model}, predicted)
        for (collective, nbytes), chosen, (by_model, predicted), measured in zip(
            points, fixed, answers["model"], answers["times_s"], strict=True
        )
    ]
    return measured_points, Spent(calibration_s, tuning_s, answers["sweep_s"])


def _choices(point: tuple[str, int], by_table: str) -> dict[str, str]:
    """Return the choice of the table, and the choices that need no measurement."""
    collective, nbytes = point
    by_threshold = next(name for below, name in THRESHOLDS[collective] if nbytes < below)
    return {"table": by_table, "thresholds": by_threshold, "rings": RINGS[collective]}


def answer(run: RunRanks, folder: Path, asked: Mapping[str, Any], environ: Mapping[str, str]) -> Any:
    """Return the answer of rank 0 to a request."""
    path = folder / "asked.json"
    path.write_text(json.dumps(asked))
    run([str(RANK), str(path)], environ)
    return json.loads(path.with_suffix(".answer").read_text())


@click.command()
@click.option("-n", "ranks", type=click.IntRange(min=2), default=4, show_default=True, help="Number of ranks.")
@click.option("--budget", "budget_s", type=float, default=11.0, show_default=True, help="Seconds of each tuning.")
@click.option("--grid", default="8:8M", show_default=True, help="Sizes that the tuner measures.")
@click.option("--sizes", default="24:6M", show_default=True, help="Sizes at which choices are scored.")
@click.option("--rounds", type=click.IntRange(min=4), default=32, show_default=True)
@click.option("--places", default="shm,tcp", show_default=True, help=f"Of {', '.join(PLACES)}.")
@click.option("--collectives", default=",".join(COLLECTIVES), show_default=True)
@click.option("--rate", default="1gbit", show_default=True, help="Rate of each shaped host's link, as for tc.")
@click.option("--per-host", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks of a shaped host.")
@click.option("--placement", type=click.Choice(PLACEMENTS), default="any", help="Keep only rounds with this placement.")
@click.option("--tuned-ranks", type=click.IntRange(min=2), multiple=True, help="Ranks of the table, instead of -n.")
def main(*, places: str, sizes: str, collectives: str, **rest: Any) -> None:
    """Measure the regret of choices on this machine."""
    asked = StudySettings(sizes=parse_sizes(sizes), collectives=tuple(collectives.split(",")), **rest)
    for number in (asked.ranks, *asked.tuned_ranks):
        if number % asked.per_host:
            raise click.UsageError(f"{number} ranks cannot be divided into hosts of {asked.per_host}: use a multiple")
    console = Console()
    every = list[SizeTimes]()
    for place in places.split(","):
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory(prefix="unisono-regret-") as folder:
            os.environ["XDG_CACHE_HOME"] = folder
            points, spent = study(place, asked, Path(folder))
        every += points
        ranks = {"ranks": asked.ranks, "per_host": asked.per_host if place == "shaped" else asked.ranks}
        measured = {"placement": asked.placement, **spent._asdict()}
        about = {**ranks, "tuned_ranks": asked.tuned_ranks, **measured, "cores": os.cpu_count(), "load": load}
        append(RESULTS, points, about)
        console.print(shown(f"{asked.ranks} ranks, {place}: {len(points)} points", points))
        variants = min(len(point.times_s) for point in points)
        console.print(
            f"{spent}; at least {variants} variants at each point; {of_model(points)}; load before {load:.1f}",
            highlight=False,
        )
    console.print(shown("all together", every))


def append(path: Path, points: Sequence[SizeTimes], about: Mapping[str, Any]) -> None:
    """Append a line of JSON for each point to a file, with the times of all rounds."""
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for point in points:
            times_us = {name: [round(s * 1e6, 2) for s in times] for name, times in point.times_s.items()}
            fields = {name: value for name, value in point._asdict().items() if name != "times_s"}
            file.write(json.dumps({**about, **fields, "times_us": times_us}) + "\n")


if __name__ == "__main__":
    begin()
    try:
        main()
    except UnisonoError as error:
        sys.exit(f"unisono: {error}")
