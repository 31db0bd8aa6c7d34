"""The figures of the concept pages, which are made from the project's own objects."""

from __future__ import annotations

import re
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import FuncFormatter

import unisono as un
from unisono.bench import curves
from unisono.bench.sizes import format_size
from unisono.cli.output.schedule_picture import COLOURS
from unisono.tuning.decide.choice import NO_STATE, Question, explain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[2]
COMPUTE_S = 0.01
BELOW_THE_FACADE = (
    ["frameworks"],
    ["collectives"],
    ["tuning", "transports"],
    ["algorithms"],
    ["vocabulary: errors, options, dtypes, operations …"],
)
COLLECTIVES = ("allreduce", "broadcast", "allgather", "reduce_scatter", "alltoall", "barrier")


def layers(ink: str) -> Figure:
    """Return a figure of the layers, the highest first. The rooms of the facade are those of the layer test."""
    test = (ROOT / "tests" / "package" / "test_layers.py").read_text()
    (rooms,) = re.findall(r"^ROOMS = \((.*)\)$", test, re.MULTILINE)
    rows = [*([name] for name in re.findall(r"\w+", rooms)), *BELOW_THE_FACADE]
    figure, axes = _blank((7.2, 0.5 * len(rows) + 0.3))
    for level, names in enumerate(rows):
        for place, name in enumerate(names):
            width = 10 / len(names)
            _box(axes, (place * width, -level), width - 0.15, name, COLOURS[level % len(COLOURS)], ink)
    axes.set(xlim=(-0.2, 10.2), ylim=(-len(rows) + 0.2, 0.9))
    return figure


def _box(axes: Axes, corner: tuple[float, float], width: float, text: str, colour: str, ink: str) -> None:
    axes.add_patch(
        FancyBboxPatch(corner, width, 0.6, boxstyle="round,pad=0.05", facecolor=colour, edgecolor=colour, alpha=0.25)
    )
    axes.text(corner[0] + width / 2, corner[1] + 0.3, text, color=ink, ha="center", va="center", fontsize=9)


def _blank(inches: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=inches, layout="constrained")
    figure.patch.set_alpha(0.0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0.0)
    axes.set_axis_off()
    return figure, axes


def boxes(lines: Sequence[str], ink: str) -> Figure:
    """Return a figure of rows of boxes, with arrows between boxes of the same or of other rows.

    Args:
        lines: the rows from top to bottom, with ``|`` between boxes; then an empty line, and the arrows, which are
            ``from, from -> to, to | label``.
        ink: the colour of text and arrows.

    Raises:
        ValueError: an arrow names a box that no row has, or does not name two ends.
    """
    gap = lines.index("") if "" in lines else len(lines)
    rows = [[name.strip() for name in line.split("|")] for line in lines[:gap]]
    width = max(sum(len(name) for name in row) + 4 * len(row) for row in rows)
    figure, axes = _blank((min(7.2, 0.095 * width + 0.4), 0.8 * len(rows)))
    places: dict[str, _Place] = {}
    for level, row in enumerate(rows):
        share = width / len(row)
        for place, name in enumerate(row):
            left, right = place * share + 1, (place + 1) * share - 1
            places[name] = _Place(left, right, -1.6 * level)
            _box(axes, (left, -1.6 * level), right - left, name, COLOURS[level % len(COLOURS)], ink)
    for line in lines[gap + 1 :]:
        ends, _, label = line.partition("|")
        if ends.count("->") != 1:
            raise ValueError(f"{line!r} is no arrow: write from -> to | label")
        _arrows(axes, places, [_names(names, places) for names in ends.split("->")], label.strip(), ink)
    axes.set(xlim=(0, width), ylim=(-1.6 * (len(rows) - 1) - 0.2, 0.8))
    return figure


class _Place(NamedTuple):
    """Where a box is: its left and right ends, and its lower edge."""

    left: float
    right: float
    bottom: float

    @property
    def middle(self) -> float:
        return (self.left + self.right) / 2


def _names(names: str, places: dict[str, _Place]) -> list[str]:
    found = [name.strip() for name in names.split(",")]
    if missing := [name for name in found if name not in places]:
        raise ValueError(f"the picture has no box {missing[0]!r}: it has {', '.join(places)}")
    return found


def _arrows(axes: Axes, places: dict[str, _Place], ends: Sequence[Sequence[str]], label: str, ink: str) -> None:
    """Draw an arrow from each box of the first list to each of the second, and the label beside the leftmost arrow."""
    middles = []
    for source in ends[0]:
        for target in ends[1]:
            start, end = _between(places[source], places[target])
            style = {"arrowstyle": "-|>", "color": ink, "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", end, start, arrowprops=style)
            middles.append(((start[0] + end[0]) / 2, (start[1] + end[1]) / 2))
    x, y = min(middles)
    if places[ends[0][0]].bottom == places[ends[1][0]].bottom:
        axes.text(x, y + 0.4, label, color=ink, fontsize=8, ha="center")
    else:
        axes.text(x + 0.8, y, label, color=ink, fontsize=8, va="center")


def _between(source: _Place, target: _Place) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the points at which an arrow leaves one box and meets another."""
    if source.bottom == target.bottom:
        first, second = (source.right, target.left) if source.left < target.left else (source.left, target.right)
        return (first, source.bottom + 0.3), (second, target.bottom + 0.3)
    # Vertical where one box is above the other, else between their middles.
    left, right = max(source.left, target.left), min(source.right, target.right)
    start, end = [(left + right) / 2] * 2 if left < right else (source.middle, target.middle)
    below, above = -0.08, 0.68
    leaves, meets = (below, above) if source.bottom > target.bottom else (above, below)
    return (start, source.bottom + leaves), (end, target.bottom + meets)


def predictions(collective: str, algorithms: Sequence[str], ranks: int, link: str, ink: str) -> Figure:
    """Return a figure of the times that the tuner's model predicts by size, without a calibration."""
    sizes = [1 << power for power in range(3, 27, 2)]
    hosts = (tuple(range(ranks)),) if link == "shm" else ()
    answers = [explain(Question(collective, size, ranks, link, hosts=hosts), NO_STATE) for size in sizes]
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    figure.patch.set_alpha(0.0)
    axes = figure.add_subplot()
    for name, colour in zip(algorithms, COLOURS, strict=False):
        times = [_predicted_us(answer.candidates, name) for answer in answers]
        axes.plot(sizes, times, label=name, color=colour, linewidth=1.6)
    chosen = [_predicted_us(answer.candidates, answer.choice.algorithm) for answer in answers]
    axes.plot(sizes, chosen, "o", color=ink, markersize=5, markerfacecolor="none", label="chosen")
    _logarithmic(axes, sizes, ink)
    axes.set_title(f"{collective}, {ranks} ranks, {link}: predicted time, µs", color=ink, fontsize=10)
    axes.legend(frameon=False, labelcolor=ink, fontsize=8)
    return figure


def _predicted_us(candidates: Sequence[Any], name: str) -> float:
    predicted = next(each.predicted_s for each in candidates if each.algorithm == name)
    return float("nan") if predicted is None else predicted * 1e6


def _logarithmic(axes: Axes, sizes: Sequence[int], ink: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes[::2])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_size(int(value))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axes.minorticks_off()
    axes.tick_params(colors=ink, labelsize=8)
    axes.grid(color=ink, alpha=0.15)
    axes.patch.set_alpha(0.0)
    for side, spine in axes.spines.items():
        spine.set_visible(side in {"left", "bottom"})
        spine.set_color(ink)


def losses(compared: Sequence[curves.Comparison]) -> list[str]:
    """Return a Markdown table of the comparisons that Unisono lost, a row for each library on each machine."""
    rows: dict[tuple[object, ...], list[curves.Comparison]] = {}
    for each in sorted(compared):
        if each.high < 1:
            rows.setdefault((each.collective, each.cpu, each.ranks, each.placement, each.library), []).append(each)
    lines = [
        "{.compact}",
        "| Collective | Machine | Ranks | Cores | Faster library | Sizes | Its time ÷ ours | Date |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (collective, cpu, ranks, placement, library), lost in rows.items():
        sizes = ", ".join(format_size(each.nbytes) for each in lost) if collective != "barrier" else ""
        low, high = min(each.ratio for each in lost), max(each.ratio for each in lost)
        ratios = f"{low:.2f}" if len(lost) == 1 else f"{low:.2f} to {high:.2f}"
        label = curves.LINES[str(library)].label
        lines.append(
            f"| {collective} | {cpu} | {ranks} | {placement} | {label} | {sizes} | {ratios} | {lost[-1].date} |"
        )
    return lines


def waiting(ink: str) -> Figure:
    """Run three ranks, of which rank 1 is slow, and return a figure of when each computed and when it waited."""
    timelines = un.launch(_timeline, 3, timeout_s=60)
    began = min(start for timeline in timelines for _, start, _ in timeline)
    figure = Figure(figsize=(7.2, 1.9), layout="constrained")
    figure.patch.set_alpha(0.0)
    axes = figure.add_subplot(yticks=range(3), yticklabels=[f"rank {rank}" for rank in range(3)], ylim=(2.5, -0.5))
    colours = {"compute": COLOURS[0], "allreduce": COLOURS[1]}
    for rank, timeline in enumerate(timelines):
        for what, start, end in timeline:
            label = what if (rank, start) == (0, timeline[0][1]) or (rank, start) == (0, timeline[1][1]) else None
            axes.barh(rank, (end - start) * 1e3, 0.6, (start - began) * 1e3, color=colours[what], label=label)
    axes.set_xlabel("milliseconds", color=ink, fontsize=8)
    axes.tick_params(colors=ink, labelsize=8)
    axes.patch.set_alpha(0.0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.legend(frameon=False, labelcolor=ink, fontsize=8, loc="outside upper center", ncols=2)
    return figure


def _timeline(world: un.Communicator) -> list[tuple[str, float, float]]:
    vector = np.ones(1 << 16)
    world.allreduce(vector)  # opens the channels
    world.barrier()
    timeline = []
    for _ in range(4):
        start = time.monotonic()
        time.sleep(COMPUTE_S * (2 if world.rank == 1 else 1))
        computed = time.monotonic()
        world.allreduce(vector, out=vector)
        timeline += [("compute", start, computed), ("allreduce", computed, time.monotonic())]
    return timeline


def gradient_steps(ink: str) -> str:
    """Train on two ranks over TCP, and return the picture of the last steps, as `GradientReducer.draw` writes it."""
    return str(un.launch(_draw_steps, 2, ink, timeout_s=60, options=un.Options(transports="tcp"))[0])


def _draw_steps(world: un.Communicator, ink: str) -> str:
    import matplotlib

    parts = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style = {**curves.SVG, **dict.fromkeys(parts, ink), "savefig.facecolor": "none", "axes.facecolor": "none"}
    names = [f"layer {number}" for number in range(6)]
    with un.GradientReducer(world, bucket_nbytes=1 << 20, timeline=True) as reducer, TemporaryDirectory() as folder:
        for _ in range(8):
            for name in reversed(names):
                time.sleep(COMPUTE_S / 4)
                reducer.ready(name, np.ones(1 << 18, np.float32))
            reducer.finish()
        with matplotlib.rc_context(style):
            reducer.draw(Path(folder, "steps.svg"))
        return Path(folder, "steps.svg").read_text(encoding="utf-8")
