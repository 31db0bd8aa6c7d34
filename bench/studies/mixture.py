"""Measures decision tables that mix Unisono's algorithms with those of an MPI library, next to each of the two alone.

    unisono bench mixture -n 2 --libraries openmpi,mpich --transports shm,mpi

Under the library's own mpiexec, in the environment that ``make mpi`` creates, `unisono tune` races the algorithms of
both within the budget, and writes one table. Then one job runs everything at sizes that are not in the table, in
interleaved rounds, as in `unisono bench regret`. "Unisono alone" is the choice of the same measurements without MPI's
algorithms, and "MPI alone" is MPI at every size. One half of the rounds chooses the rival and the other half scores it,
and then the other way round. The times of every round are appended to bench/results/mixture.jsonl.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple, TypeAlias

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from unisono.bench.peers import MPI_LIBRARIES, mpi_ranks
from unisono.bench.sizes import parse_sizes
from unisono.bench.studies.judgement import SizeTimes
from unisono.bench.studies.regret import NAMED, RUN_S, RunRanks, StudySettings, answer, append
from unisono.errors import UnisonoError
from unisono.foundation.program import begin
from unisono.tuning.decide.table import compiled, dumped, to_json
from unisono.tuning.measure.measurement_log import MeasurementStore

COLLECTIVES = ("allreduce", "broadcast", "allgather")
MPI_NATIVE = "mpi.native"
RESULTS = Path(__file__).resolve().parents[1] / "results" / "mixture.jsonl"

# Returns the variants of a point that a selector is compared with.
Rivals: TypeAlias = Callable[[SizeTimes], Sequence[str]]


class MpiPlace(NamedTuple):
    """An MPI library, and the transport of Unisono's own algorithms."""

    library: str
    transport: str

    def __str__(self) -> str:
        """Return a description for people."""
        return f"{self.library}, own algorithms by {self.transport}"


class SelectorComparison(NamedTuple):
    """A comparison of the choices of a selector with the fastest choice of its rivals at each point."""

    name: str
    selector: str
    rivals: Rivals


COMPARISONS = (
    SelectorComparison("table of both ÷ the better of the two", "both", lambda point: _chosen_by(point, "own", "mpi")),
    SelectorComparison("table of both ÷ Unisono alone", "both", lambda point: _chosen_by(point, "own")),
    SelectorComparison("table of both ÷ MPI alone", "both", lambda point: _chosen_by(point, "mpi")),
    SelectorComparison("table of both ÷ the best of all", "both", lambda point: list(point.times_s)),
    SelectorComparison("Unisono alone ÷ the best of all", "own", lambda point: list(point.times_s)),
    SelectorComparison("MPI alone ÷ the best of all", "mpi", lambda point: list(point.times_s)),
)


def ratio(point: SizeTimes, comparison: SelectorComparison) -> float:
    """Return the time of the choice over that of the best rival, which the other half of the rounds determines."""
    chosen, rivals = point.choices[comparison.selector], comparison.rivals(point)
    ratios = list[float]()
    for choosing, scoring in (point.halves(), point.halves()[::-1]):
        best = min(rivals, key=choosing.__getitem__)
        ratios.append(scoring[chosen] / scoring[best])
    return geometric_mean(ratios)


def study(place: MpiPlace, asked: StudySettings, folder: Path) -> list[SizeTimes]:
    """Tune and sweep under one library; return the points."""
    run, points = _ranks(place, asked.ranks), asked.points()
    both, own = folder / "both.json", folder / "own.json"
    settings = ["--sizes", asked.grid, "--out", str(both), "--budget", f"{asked.budget_s}s"]
    tune = ["-m", "unisono", "tune", "--force", *settings]
    run([*tune, "--collectives", ",".join(asked.collectives)], {})
    _write_own(both, own)
    chosen = [answer(run, folder, {"points": points}, {"UNISONO_TABLE": str(table)}) for table in (both, own)]
    choices = [{"both": one, "own": other, "mpi": MPI_NATIVE} for one, other in zip(*chosen, strict=True)]
    also = [[*NAMED[name], *dict.fromkeys(named.values())] for (name, _), named in zip(points, choices, strict=True)]
    request = {"points": points, "also": also, "rounds": asked.rounds, "run_s": RUN_S, "placement": asked.placement}
    times = answer(run, folder, request, {})["times_s"]
    rows = zip(points, times, choices, strict=True)
    return [SizeTimes(place.transport, name, nbytes, measured, chosen, {}) for (name, nbytes), measured, chosen in rows]


def _ranks(place: MpiPlace, ranks: int) -> RunRanks:
    def run(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        command, variables = mpi_ranks(place.library, ranks, arguments)
        settings = {**os.environ, "UNISONO_TRANSPORTS": place.transport, **variables, **environ}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=settings)

    return run


def _write_own(both: Path, own: Path) -> None:
    """Write the table that follows from the measurements of only Unisono's own algorithms."""
    measured = MeasurementStore(both.with_suffix(".jsonl")).read()
    table = compiled(each for each in measured if each.variant != MPI_NATIVE)
    own.write_text(dumped(to_json(table)), encoding="utf-8")


def _chosen_by(point: SizeTimes, *selectors: str) -> list[str]:
    return [point.choices[selector] for selector in selectors]


def shown(title: str, points: Sequence[SizeTimes]) -> Table:
    """Return a table for people: for each comparison, the ratio of times."""
    table = Table(title=title)
    for heading in ("time of ÷ time of", "geometric mean", "p95", "max"):
        table.add_column(heading, justify="left" if "÷" in heading else "right")
    for comparison in COMPARISONS:
        ratios = [ratio(point, comparison) for point in points]
        numbers = geometric_mean(ratios), float(np.quantile(ratios, 0.95)), max(ratios)
        table.add_row(comparison.name, *(f"{number:.3f}" for number in numbers))
    return table


def _split(context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


@click.command()
@click.option("-n", "ranks", type=click.IntRange(min=2), default=2, show_default=True, help="Number of ranks.")
@click.option("--libraries", default=",".join(MPI_LIBRARIES), show_default=True, callback=_split)
@click.option("--transports", default="shm,mpi", show_default=True, callback=_split, help="For Unisono's algorithms.")
@click.option("--budget", "budget_s", type=float, default=10.0, show_default=True, help="Seconds of each tuning.")
@click.option("--grid", default="8:8M", show_default=True, help="Sizes that the tuner measures.")
@click.option("--sizes", default="24:6M", show_default=True, help="Sizes at which choices are scored.")
@click.option("--rounds", type=click.IntRange(min=4), default=16, show_default=True)
@click.option("--collectives", default=",".join(COLLECTIVES), show_default=True, callback=_split)
def main(*, libraries: Sequence[str], transports: Sequence[str], sizes: str, **rest: Any) -> None:
    """Measure how good tables of both Unisono's and MPI's algorithms are on this machine."""
    asked = StudySettings(sizes=parse_sizes(sizes), **rest)
    console, every = Console(), list[SizeTimes]()
    for place in [MpiPlace(library, transport) for library in libraries for transport in transports]:
        began, load = time.monotonic(), os.getloadavg()[0]
        with tempfile.TemporaryDirectory(prefix="unisono-mixture-") as folder:
            os.environ["XDG_CACHE_HOME"] = folder
            points = study(place, asked, Path(folder))
        every += points
        about = {**place._asdict(), "ranks": asked.ranks, "cores": os.cpu_count(), "budget_s": asked.budget_s}
        append(RESULTS, points, {**about, "load": load})
        console.print(shown(f"{asked.ranks} ranks under {place}: {len(points)} points", points))
        taken = sum(point.choices["both"] == MPI_NATIVE for point in points)
        console.print(f"MPI's own chosen at {taken}; {time.monotonic() - began:.0f} s in all", highlight=False)
    console.print(shown("all together", every))


if __name__ == "__main__":
    begin()
    try:
        main()
    except UnisonoError as error:
        sys.exit(f"unisono: {error}")
