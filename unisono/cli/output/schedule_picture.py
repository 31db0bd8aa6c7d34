"""Pictures of schedules: an arrow for each move of data between ranks, one panel for each algorithm.

The vertical axis is time, in which every step takes one unit. The colour of an arrow shows its first block.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from unisono.algorithms.ir.drawing import DrawnGroup, DrawnMove, local_steps, moves, start_times
from unisono.algorithms.ir.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# After Okabe and Ito, for people who confuse red and green. Each can be seen on a light and on a dark page. A schedule
# with more blocks takes as many colours of a map from blue to red.
COLOURS = ("#1a85c4", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MOST_INCHES = 300.0
_LABEL_AT = 0.3  # the distance of a label from the source of its arrow, in ranks


class Panel(NamedTuple):
    """A schedule with its title. `plans` are the plans of the ranks to draw, and `schedule` is ``rows(plans)``."""

    title: str
    plans: Sequence[Plan]
    schedule: Sequence[DrawnGroup]


def picture(panels: Sequence[Panel], ink: str = "black") -> Figure:
    """Return a figure with the panels side by side on a transparent ground. `ink` is the colour of text and lines."""
    widths = [0.9 + 0.85 * max(panel.plans[0].size, 2) for panel in panels]
    depths = [max(map(_time_of, _items(panel)), default=0) + 1 for panel in panels]
    size = (min(sum(widths), MOST_INCHES), min(1.1 + 0.62 * max(depths), MOST_INCHES))
    figure = Figure(figsize=size, layout="constrained")
    figure.patch.set_alpha(0.0)
    grid = figure.subplots(1, len(panels), squeeze=False, width_ratios=widths)
    for axes, panel in zip(grid[0], panels, strict=True):
        _draw(axes, panel, max(depths), ink)
    figure.supxlabel("solid: combined on arrival · dashed: stored · colour: block", fontsize=8, color=ink)
    return figure


def _draw(axes: Axes, panel: Panel, depth: int, ink: str) -> None:
    size = panel.plans[0].size
    axes.set_title(panel.title, color=ink, fontsize=10)
    axes.set(xlim=(-0.6, size - 0.4), ylim=(depth, -0.05), xticks=range(size), yticks=[])
    axes.xaxis.tick_top()
    axes.set_xticklabels([f"rank {rank}" for rank in range(size)], color=ink, fontsize=8)
    axes.tick_params(length=0)
    axes.patch.set_alpha(0.0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    items = _items(panel)
    own_depth = max(map(_time_of, items), default=0) + 1
    axes.vlines(range(size), 0, own_depth, color=ink, alpha=0.35, linewidth=1)
    for at in range(0, own_depth, 2):
        axes.axhspan(at, at + 1, color=ink, alpha=0.06, linewidth=0)
    colours = _colours([item for item in items if isinstance(item, _Arrow)])
    for item in items:
        if isinstance(item, _Arrow):
            _draw_arrow(axes, item, colours[_first_block(item.move.data)])
        else:
            axes.plot(item.rank, item.time + 0.5, marker="s", markersize=5, color=ink)
            axes.text(item.rank + 0.08, item.time + 0.5, item.text, fontsize=7, color=ink, verticalalignment="center")


class _Arrow(NamedTuple):
    time: int
    move: DrawnMove
    text: str


class _LocalStep(NamedTuple):
    time: int
    rank: int
    text: str


def _time_of(item: _Arrow | _LocalStep) -> int:
    return item.time


def _items(panel: Panel) -> list[_Arrow | _LocalStep]:
    """Return the arrows and the local steps of a panel, each with its time."""
    starts = start_times(panel.plans, panel.schedule)
    cut = any(row.segment for row in panel.schedule)
    items = list[_Arrow | _LocalStep]()
    for row in panel.schedule:
        place, suffix = row[:3], f".{row.segment}" if cut else ""
        for move in moves(panel.plans, row):
            time = max(starts.get((rank, *place), 0) for rank in (move.source, move.target))
            items.append(_Arrow(time, move, move.data + suffix))
        for plan, group in zip(panel.plans, row.groups, strict=True):
            instance = (plan.rank, *place)
            items += [_LocalStep(starts[instance], plan.rank, text) for text in local_steps(plan, group)]
    return items


def _colours(arrows: Sequence[_Arrow]) -> Mapping[int, Any]:
    """Return a colour for each first block of the arrows; no two blocks have the same."""
    blocks = sorted({_first_block(arrow.move.data) for arrow in arrows})
    colours: Iterable[Any] = COLOURS
    if len(blocks) > len(COLOURS):
        colours = colormaps["turbo"](np.linspace(0.05, 0.95, len(blocks)))
    return dict(zip(blocks, colours, strict=False))


def _draw_arrow(axes: Axes, arrow: _Arrow, colour: Any) -> None:
    move, time = arrow.move, arrow.time
    start, end = (move.source, time + 0.08), (move.target, time + 0.92)
    style = "solid" if move.combines else (0, (4, 2))
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=9, color=colour, linestyle=style, linewidth=1.4, shrinkA=0
        )
    )
    share = _LABEL_AT / max(abs(move.target - move.source), 1)
    x, y = (a + share * (b - a) for a, b in zip(start, end, strict=True))
    axes.text(x, y - 0.11, arrow.text, fontsize=7, color=colour, horizontalalignment="center", weight="bold")


def _first_block(data: str) -> int:
    number = re.search(r"\d+", data)
    return int(number[0]) if number else 0
