"""Curves of saved benchmarks: the time of a call and the bus bandwidth by size, one line for each library.

    unisono bench curves bench/results/allreduce.jsonl --svg allreduce.svg

draws the newest benchmark in the file that measured all the named libraries at many sizes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from unisono.bench.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Text stays text, and the same benchmark gives the same file.
SVG = {"svg.fonttype": "none", "svg.hashsalt": "unisono"}
# Search engines would show the metadata as text of the page.
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
MANY_SIZES = 4
MOST_LABELS = 6
PEERS = ("openmpi", "impi")
OURS = "unisono-shm"


class DrawnLine(NamedTuple):
    """How a library is drawn: its name for people, its colour, and whether its line is dashed."""

    label: str
    colour: str
    dashed: bool = False


# Colours that can be told apart by people who confuse red and green, on light and on dark pages.
LINES: Mapping[str, DrawnLine] = {
    "unisono-shm": DrawnLine("Unisono", "#d55e00"),
    "unisono-tcp": DrawnLine("Unisono over TCP", "#d55e00", dashed=True),
    "unisono-empty": DrawnLine("Unisono, arrays of un.empty", "#e69f00", dashed=True),
    "openmpi": DrawnLine("Open MPI", "#1a85c4"),
    "openmpi-single": DrawnLine("Open MPI, one thread", "#1a85c4", dashed=True),
    "mpich": DrawnLine("MPICH", "#009e73"),
    "mpich-single": DrawnLine("MPICH, one thread", "#009e73", dashed=True),
    "impi": DrawnLine("Intel MPI", "#cc79a7"),
    "oneccl": DrawnLine("oneCCL", "#56b4e9"),
    "gloo": DrawnLine("Gloo", "#8c8c8c"),
}


class Benchmark(NamedTuple):
    """A saved benchmark whose rounds are restricted to one placement of the first two ranks.

    Attributes:
        document: as `unisono bench --out` writes it.
        placement: "near", "far", "core" or "unknown".
        rows: the rows of this placement that have times.
    """

    document: Mapping[str, Any]
    placement: str
    rows: Sequence[Mapping[str, Any]]

    @property
    def title(self) -> str:
        """The collective, the dtype, the ranks, the machine and the date."""
        latencies = [row["latency_ns"] for row in self.rows if row["latency_ns"] is not None]
        distance = f", {self.placement} cores ({min(latencies):.0f}–{max(latencies):.0f} ns)" if latencies else ""
        facts = self.document
        return (
            f"{facts['collective']} of {facts['dtype']}, {facts['ranks']} ranks, "
            f"{_processor(facts)}{distance}, {facts['date'][:10]}"
        )

    def times(self, library: str) -> dict[int, float]:
        """Return the median time of a call in microseconds, by size in bytes."""
        return {row["nbytes"]: row["median_us"] for row in self.rows if row["library"] == library}

    def bandwidths(self, library: str) -> dict[int, float]:
        """Return the bus bandwidth in 1e9 bytes per second, by size in bytes."""
        return {row["nbytes"]: row["busbw"] for row in self.rows if row["library"] == library and row["busbw"]}

    @property
    def libraries(self) -> list[str]:
        """The measured libraries that have a line, in the order of `LINES`."""
        measured = {row["library"] for row in self.rows}
        return [name for name in LINES if name in measured]


def saved(path: Path) -> list[Benchmark]:
    """Return the benchmarks of a file, one for each placement of each document, the oldest first."""
    documents = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [benchmark for document in documents for benchmark in by_placement(document)]


def by_placement(document: Mapping[str, Any]) -> list[Benchmark]:
    """Return a benchmark for each placement of the rows that have times."""
    rows = [row for row in document["rows"] if row["median_us"] is not None]
    placements = sorted({row["placement"] for row in rows})
    return [Benchmark(document, name, [row for row in rows if row["placement"] == name]) for name in placements]


def newest(path: Path, libraries: Sequence[str], cpu: str = "", ranks: int = 2) -> Benchmark:
    """Return the newest benchmark that measured all `libraries` at `MANY_SIZES` sizes or more.

    Args:
        path: a file that `unisono bench --save` has written.
        libraries: names as in the file, such as "openmpi".
        cpu: a part of the processor's name; empty for any.
        ranks: the number of ranks.

    Raises:
        LookupError: there is no such benchmark.
    """
    fitting = [
        each
        for each in saved(path)
        if cpu in each.document["machine"]["cpu"]
        and each.document["ranks"] == ranks
        and all(len(each.times(library)) >= MANY_SIZES for library in libraries)
    ]
    if not fitting:
        raise LookupError(f"{path} has no benchmark of {', '.join(libraries)} at {MANY_SIZES} sizes or more")
    return max(fitting, key=lambda each: str(each.document["date"]))


class Comparison(NamedTuple):
    """The newest comparison of a library with Unisono over shared memory, in one situation.

    Attributes:
        collective, cpu, ranks, dtype, placement, nbytes, library: the situation.
        date: the day of the measurement.
        ratio: the time of the library, divided by that of Unisono.
        high: the upper end of the ratio's 95 % interval. Below 1, the library was surely faster.
    """

    collective: str
    cpu: str
    ranks: int
    dtype: str
    placement: str
    nbytes: int
    library: str
    date: str
    ratio: float
    high: float


def comparisons(paths: Sequence[Path]) -> list[Comparison]:
    """Return the newest comparison for each situation in the files, which `unisono bench --save` has written."""
    newest_of: dict[tuple[object, ...], Comparison] = {}
    benchmarks = [benchmark for path in paths for benchmark in saved(path)]
    for benchmark in sorted(benchmarks, key=lambda each: str(each.document["date"])):
        for row in benchmark.rows:
            ratio = (row["ratios"] or {}).get(OURS)
            if ratio is not None and row["library"] in LINES and not row["library"].startswith("unisono"):
                compared = _comparison(benchmark, row, ratio)
                newest_of[compared[:7]] = compared
    return list(newest_of.values())


def _comparison(benchmark: Benchmark, row: Mapping[str, Any], ratio: Mapping[str, float]) -> Comparison:
    facts = benchmark.document
    return Comparison(
        collective=facts["collective"],
        cpu=_processor(facts),
        ranks=facts["ranks"],
        dtype=facts["dtype"],
        placement=benchmark.placement,
        nbytes=row["nbytes"],
        library=row["library"],
        date=facts["date"][:10],
        ratio=ratio["value"],
        high=ratio["high"],
    )


def _processor(document: Mapping[str, Any]) -> str:
    return " ".join(str(document["machine"]["cpu"]).replace("(R)", "").split())


def picture(benchmark: Benchmark, ink: str = "black") -> Figure:
    """Return a figure of the time and the bandwidth by size, on a transparent ground.

    `ink` is the colour of text and axes. Both axes of the times are logarithmic.
    """
    figure = Figure(figsize=(9, 4), layout="constrained")
    figure.patch.set_alpha(0.0)
    times, bandwidths = figure.subplots(1, 2)
    for library in benchmark.libraries:
        _plot(times, library, benchmark.times(library))
        _plot(bandwidths, library, benchmark.bandwidths(library))
    times.set_yscale("log")
    times.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    times.set_title("time of a call, µs (lower is better)", color=ink, fontsize=10)
    bandwidths.set_title("bus bandwidth, GB/s (higher is better)", color=ink, fontsize=10)
    for axes in (times, bandwidths):
        dress(axes, sorted({row["nbytes"] for row in benchmark.rows}), ink)
    handles, labels = times.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, labelcolor=ink, fontsize=9)
    figure.suptitle(benchmark.title, color=ink, fontsize=10)
    return figure


def _plot(axes: Axes, library: str, values: Mapping[int, float]) -> None:
    line = LINES[library]
    ours = library.startswith("unisono")
    axes.plot(
        sorted(values),
        [values[size] for size in sorted(values)],
        label=line.label,
        color=line.colour,
        linestyle="dashed" if line.dashed else "solid",
        linewidth=2.4 if ours else 1.4,
        marker="o",
        markersize=4 if ours else 3,
        zorder=3 if ours else 2,
    )


def dress(axes: Axes, sizes: Sequence[int], ink: str) -> None:
    """Give axes with sizes in bytes along x the style of all our curves. `ink` is the colour of text and lines."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes[:: 1 if len(sizes) <= MOST_LABELS else 2])
    axes.set_xticklabels([format_size(size) for size in axes.get_xticks()], color=ink, fontsize=8)
    axes.minorticks_off()
    axes.tick_params(colors=ink, labelsize=8)
    axes.patch.set_alpha(0.0)
    axes.grid(color=ink, alpha=0.15)
    for side, spine in axes.spines.items():
        spine.set_visible(side in {"left", "bottom"})
        spine.set_color(ink)


def main() -> None:
    """Draw the newest fitting benchmark of a file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, help="a file that `unisono bench --save` has written")
    parser.add_argument("--against", default=",".join(PEERS), help="peers that must have been measured")
    parser.add_argument("--cpu", default="", help="a part of the processor's name")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ink", default="black", help="the colour of text and axes")
    parser.add_argument("--svg", type=Path, required=True)
    arguments = parser.parse_args()
    benchmark = newest(arguments.results, [OURS, *arguments.against.split(",")], arguments.cpu, arguments.ranks)
    with matplotlib.rc_context(SVG):
        picture(benchmark, arguments.ink).savefig(arguments.svg, format="svg", metadata=NO_METADATA)


if __name__ == "__main__":
    main()
