"""Ranks every algorithm of a collective on this machine, for each size and number of ranks.

    unisono bench algorithms allreduce -n 2,4 --sizes 8:1M --svg arena.svg

All algorithms take part that can run: those that the tuner chooses among, those that run by name only, and schedules
and algorithms of files (`--load`). At each point, that is a size and a number of ranks, all of them run in rounds, each
round in another order. The time of an algorithm is the median over the rounds. Its *regret* at a point is this time
divided by the least one.

Ctrl-C ends the measurement and shows the points that are complete.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import unisono as un
from unisono.algorithms.catalogue.registry import candidates_of
from unisono.bench.sizes import format_size, parse_sizes
from unisono.bench.variants import check_named
from unisono.collectives.measurement.call_trials import CallTrials
from unisono.errors import UsageError
from unisono.foundation import streams
from unisono.foundation.program import begin
from unisono.tuning.measure.race import typical_s

# Rank 0 begins lines with this if they report to the parent process.
_REPORT = "\x1eunisono-arena "
_INTERRUPTED = 130
_SEED = 0
_DARK = 2.3  # cells of a greater regret are so dark that their text is white
_MOST_S = 100.0  # for each point, besides the measured time


class Point(NamedTuple):
    """The times at a size and a number of ranks.

    Attributes:
        ranks, nbytes: where they were measured.
        times_s: the time of each algorithm that can run.
        chosen: the algorithm whose regret is shown; the tuner's, unless the user names another one.
    """

    ranks: int
    nbytes: int
    times_s: Mapping[str, float]
    chosen: str

    @property
    def best(self) -> str:
        """The fastest algorithm."""
        return min(self.times_s, key=self.times_s.__getitem__)

    def regret(self, algorithm: str) -> float | None:
        """Return the time of an algorithm divided by the least time; None if it was not measured."""
        time_s = self.times_s.get(algorithm)
        return None if time_s is None else time_s / self.times_s[self.best]


class Standing(NamedTuple):
    """The result of one algorithm over all points: how often it was best, and its mean and greatest regret there."""

    algorithm: str
    wins: int
    points: int
    mean: float
    worst: float


class Request(NamedTuple):
    """The points that all ranks measure: the sizes of a collective, the rounds, and the algorithm of the regret."""

    collective: str
    sizes: tuple[int, ...]
    rounds: int
    run_s: float
    chosen: str | None


def standings(points: Sequence[Point]) -> list[Standing]:
    """Return the standings, the best first: by the number of points at which an algorithm runs, then by mean regret."""
    names = sorted({name for point in points for name in point.times_s})
    found = []
    for name in names:
        regrets = [regret for point in points if (regret := point.regret(name)) is not None]
        wins = sum(point.best == name for point in points)
        found.append(Standing(name, wins, len(regrets), geometric_mean(regrets), max(regrets)))
    return sorted(found, key=lambda each: (-each.points, each.mean))


def measured(comm: un.Communicator, request: Request) -> None:
    """Measure all sizes on a communicator; rank 0 reports each point to the parent process."""
    if request.chosen is not None:
        check_named("--chosen", request.chosen, request.collective)  # on a rank, where files have been loaded
    trials, draw = CallTrials(comm, run_s=request.run_s), random.Random(_SEED)
    for size in request.sizes:
        nbytes = trials.nbytes(request.collective, size)
        chosen = request.chosen or str(comm.explain(request.collective, nbytes).choice.variant)
        names = dict.fromkeys([chosen, *(a.name for a in candidates_of(request.collective).values() if not a.vendor)])
        able = [name for name in names if trials.prepare(request.collective, nbytes, name) is None]
        times: dict[str, list[float]] = {name: [] for name in able}
        for _ in range(request.rounds):
            for name in draw.sample(able, len(able)):
                times[name].append(typical_s(trials.run(request.collective, nbytes, name)[0]))
        if comm.rank == 0:
            point = Point(comm.size, nbytes, {name: median(each) for name, each in times.items()}, chosen)
            streams.write(sys.stdout, f"{_REPORT}{json.dumps(point)}\n")


def arena(request: Request, ranks: Sequence[int], options: un.Options, see: Callable[[Point], None]) -> bool:
    """Measure on each number of ranks, and pass each point on; return whether the user has interrupted it."""

    def line(rank: int, stream: str, text: str) -> None:
        if text.startswith(_REPORT):
            see(Point(*json.loads(text.removeprefix(_REPORT))))
        else:
            streams.write(sys.stdout if stream == "stdout" else sys.stderr, f"[{rank}] {text}\n")

    limit_s = _MOST_S * (len(request.sizes) + request.rounds)
    for size in ranks:
        try:
            un.launch(measured, size, request, options=options, on_output=line, timeout_s=limit_s)
        except KeyboardInterrupt:
            return True
    return False


def table(points: Sequence[Point]) -> Table:
    """Return the standings as a table."""
    shown = Table()
    for heading in ("algorithm", "fastest at", "runs at", "mean regret", "worst regret"):
        shown.add_column(heading, justify="left" if heading == "algorithm" else "right", no_wrap=True)
    for each in standings(points):
        shown.add_row(each.algorithm, str(each.wins), str(each.points), f"{each.mean:.2f}", f"{each.worst:.2f}")
    return shown


def document(request: Request, points: Sequence[Point], *, complete: bool) -> dict[str, Any]:
    """Return the results for machines."""
    return {
        "collective": request.collective,
        "complete": complete,
        "points": [{**point._asdict(), "best": point.best, "regret": point.regret(point.chosen)} for point in points],
        "standings": [each._asdict() for each in standings(points)],
    }


def draw_map(path: Path, request: Request, points: Sequence[Point]) -> None:
    """Write an SVG with two maps of ranks and sizes: the fastest algorithms, and the regret of the chosen ones."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from unisono.bench.curves import NO_METADATA, SVG

    sizes, counts = (sorted({getattr(point, name) for point in points}) for name in ("nbytes", "ranks"))
    names = sorted({point.best for point in points})
    figure = Figure(figsize=(2.5 + 2.2 * len(sizes), 2.6 + 1.1 * len(counts)), layout="constrained")
    axes = figure.subplots(2, 1)
    best, regrets = ([[float("nan")] * len(sizes) for _ in counts] for _ in range(2))
    for point in points:
        row, column = counts.index(point.ranks), sizes.index(point.nbytes)
        best[row][column] = names.index(point.best)
        regret = point.regret(point.chosen) or float("nan")
        regrets[row][column] = regret
        axes[0].text(column, row, point.best, ha="center", va="center", fontsize=7)
        text = {"ha": "center", "va": "center", "fontsize": 7, "color": "white" if regret > _DARK else "black"}
        axes[1].text(column, row, f"{point.chosen[:24]}\n{regret:.2f}", **text)
    axes[0].imshow(best, cmap="Pastel1", aspect="auto", vmin=0, vmax=max(8, len(names)))
    axes[1].imshow(regrets, cmap="YlOrRd", aspect="auto", vmin=1, vmax=3, alpha=0.7)
    for part, title in zip(axes, ("fastest algorithm", f"regret of {request.chosen or 'the choice'}"), strict=True):
        part.set_title(f"{request.collective}: {title}", fontsize=9)
        part.set_xticks(range(len(sizes)), [format_size(nbytes) for nbytes in sizes], fontsize=7)
        part.set_yticks(range(len(counts)), [f"{count} ranks" for count in counts], fontsize=7)
    with mpl.rc_context(SVG):
        figure.savefig(path, format="svg", metadata=NO_METADATA)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="unisono bench algorithms", description=__doc__.partition("\n")[0])
    parser.add_argument("collective", help="such as allreduce")
    parser.add_argument("-n", dest="ranks", default="2", help="numbers of ranks, such as 2,4,8")
    parser.add_argument("--sizes", default="8:4M:16", help="FIRST:LAST[:FACTOR], or sizes with commas between")
    parser.add_argument("--rounds", type=int, default=5, help="rounds at each point")
    parser.add_argument("--seconds", type=float, default=0.01, help="seconds of an algorithm in a round")
    parser.add_argument("--transports", default="auto", help="as the option `transports`")
    parser.add_argument("--chosen", help="the algorithm whose regret is shown; default: the tuner's choice")
    parser.add_argument("--load", default=[], action="append", help="a schedule, or a file that registers algorithms")
    parser.add_argument("--svg", type=Path, help="write a heat map to this file")
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    return parser.parse_args(arguments)


def _counts(text: str) -> list[int]:
    with suppress(ValueError):
        counts = sorted({int(part) for part in text.split(",")})
        if counts[0] >= 1:
            return counts
    raise UsageError(f"-n cannot be {text!r}: it must be numbers of ranks such as 2,4,8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show the standings, and draw the map; the exit code is 130 if the user has interrupted it."""
    begin()
    given = _parsed(arguments)
    candidates_of(given.collective)  # raises if there is no such collective
    if given.rounds < 1 or not given.seconds > 0:
        raise UsageError("--rounds must be at least 1, and --seconds more than 0")
    if given.svg and not given.svg.absolute().parent.is_dir():
        raise UsageError(f"--svg cannot be written: there is no folder {str(given.svg.absolute().parent)!r}")
    request = Request(given.collective, parse_sizes(given.sizes), given.rounds, given.seconds, given.chosen)
    options = un.Options(transports=given.transports, load=os.pathsep.join(map(os.path.abspath, given.load)))
    points, counts = list[Point](), _counts(given.ranks)
    errors = Console(stderr=True)
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("starting", total=len(counts) * len(request.sizes))

        def see(point: Point) -> None:
            points.append(point)
            bar.update(task, advance=1, description=f"{point.ranks} ranks, {format_size(point.nbytes)}: {point.best}")

        interrupted = arena(request, counts, options, see)
    if points:
        _show(given, request, points, complete=not interrupted)
    return _INTERRUPTED if interrupted else 0


def _show(given: argparse.Namespace, request: Request, points: Sequence[Point], *, complete: bool) -> None:
    if given.json:
        streams.write(sys.stdout, json.dumps(document(request, points, complete=complete), indent=2) + "\n")
    else:
        Console().print(table(points))
    if given.svg:
        draw_map(given.svg, request, points)
