"""``unisono tune report``: a decision table and its measurements as one HTML page that works offline.

The page shows the fastest variant by size and how much slower the second best is, the times of variants with their
confidence intervals, predictions beside measurements, and the regret of the model's choices.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from unisono.algorithms.catalogue.variants import parsed
from unisono.bench.curves import NO_METADATA, SVG, dress
from unisono.bench.sizes import format_size
from unisono.errors import NoAlgorithmError, UsageError
from unisono.foundation import html_page
from unisono.tuning.decide.choice import Question, TunerState, candidate
from unisono.tuning.decide.table import Decision, Table
from unisono.tuning.machine.parameters import PRIORS, Parameters
from unisono.tuning.measure.measurement_log import Context, Measurement

_MOST_CURVES = 8
# Colours that can be told apart by people who confuse red and green; the first is that of the winner.
_COLOURS = ("#d55e00", "#1a85c4", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c", "#332288")
# Backgrounds of cells: each algorithm of a table gets one, in the order of its first appearance.
_SHADES = ("#dbeaf7", "#fbe3d0", "#d5efe6", "#f3dfea", "#fbeccb", "#e4e4e0", "#e2def1", "#f7dcdc")
_STYLE = """table.winners { width: 100% } table.winners td { border: 1px solid #fff; font-size: 12px; min-width: 3.4em }
table.winners th { font-size: 12px } table.winners small { color: #555 }
"""


def write(
    table: Table,
    machines: Sequence[str],
    measurements: Sequence[Measurement],
    folder: Path,
    parameters: Parameters = PRIORS,
) -> Path:
    """Write the page into `folder`, which is created if necessary, and return its path.

    Args:
        table: the decision table.
        machines: a line for each machine of the table, with the dates and the load of its measurements.
        measurements: the measurements from which the table was compiled, for their confidence intervals.
        folder: where to write.
        parameters: the costs by which the model predicts.

    Raises:
        UsageError: the folder cannot be written, or the table is empty.
    """
    if not table.decisions:
        raise UsageError("the table has no decisions to draw")
    page = folder / "index.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        page.write_text(_page(table, machines, measurements, TunerState(None, parameters)), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the report cannot be written to {folder}: {error.strerror}") from None
    return page


def _page(table: Table, machines: Sequence[str], measurements: Sequence[Measurement], state: TunerState) -> str:
    parts = [f"<p>{escape(line)}</p>" for line in machines]
    parts += ["<h2>The fastest variant by size</h2>", _winners(table)]
    for context, decision in table.decisions.items():
        of_context = [each for each in measurements if each.context == context]
        parts += [f"<h2>{escape(_title(context))}</h2>", _drawn(_draw_curves, decision, of_context)]
    pairs = {context: _pairs(context, decision, state) for context, decision in table.decisions.items()}
    parts += ["<h2>Predicted beside measured times</h2>", _drawn(_draw_model, pairs)]
    parts += ["<h2>The loss by the model alone</h2>", _drawn(_draw_regret, pairs)]
    return html_page.page("Decision table", "\n".join(parts), _STYLE)


def _title(context: Context) -> str:
    return f"{context.collective}, {context.ranks} ranks by {context.link}, {context.dtype} dtypes"


def _winners(table: Table) -> str:
    """Return a row for each context and a column for each size; a variant has one cell over the sizes where it wins."""
    shades: dict[str, str] = {}
    sizes = sorted({nbytes for decision in table.decisions.values() for nbytes in decision.sizes})
    head = "".join(f"<th>{format_size(nbytes)}</th>" for nbytes in sizes)
    rows = []
    for context, decision in table.decisions.items():
        winners = [(decision.variant_at(nbytes) or "", nbytes) for nbytes in sizes]
        cells = [
            _cell(variant, [nbytes for _, nbytes in part], decision, shades)
            for variant, part in ((name, list(each)) for name, each in groupby(winners, key=lambda pair: pair[0]))
        ]
        rows.append(f"<tr><th>{escape(_title(context))}</th>{''.join(cells)}</tr>")
    note = (
        "<p>Below each variant: by how much the second best is slower, from the first to the last of these sizes.</p>"
    )
    return f'{note}<div class="scroll"><table class="winners"><tr><th></th>{head}</tr>{"".join(rows)}</table></div>'


def _cell(variant: str, sizes: Sequence[int], decision: Decision, shades: dict[str, str]) -> str:
    shade = shades.setdefault(variant.partition("(")[0], _SHADES[len(shades) % len(_SHADES)])
    leads = [f"+{lead:.0%}" for nbytes in (sizes[0], sizes[-1]) if (lead := _lead(decision, nbytes)) is not None]
    text = f"{escape(variant)}<br><small>{'…'.join(dict.fromkeys(leads))}</small>"
    return f'<td colspan="{len(sizes)}" style="background: {shade}">{text}</td>'


def _lead(decision: Decision, nbytes: int) -> float | None:
    """Return by which part of the best time the second best is slower; None if only one variant was measured."""
    times = sorted(decision.times_at(nbytes).values())
    return times[1] / times[0] - 1.0 if len(times) > 1 else None


def _drawn(draw: Callable[..., None], *arguments: Any) -> str:
    """Return a picture as an element of SVG."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    text = io.StringIO()
    with matplotlib.rc_context(SVG):
        draw(figure, *arguments)
        figure.savefig(text, format="svg", metadata=NO_METADATA)
    return text.getvalue()[text.getvalue().index("<svg") :]


def _draw_curves(figure: Figure, decision: Decision, own: Sequence[Measurement]) -> None:
    axes = figure.add_subplot()
    best = sorted(decision.times_s, key=lambda variant: _place(decision, variant))[:_MOST_CURVES]
    for variant, colour in zip(best, _COLOURS, strict=False):
        points = [(n, s) for n, s in zip(decision.sizes, decision.times_s[variant], strict=True) if s is not None]
        times_us = [s * 1e6 for _, s in points]
        axes.plot([n for n, _ in points], times_us, marker="o", markersize=3, color=colour, label=variant)
        band = sorted((each.nbytes, each.low_s * 1e6, each.high_s * 1e6) for each in own if each.variant == variant)
        if band:
            low, middle, high = (list(each) for each in zip(*band, strict=True))
            axes.fill_between(low, middle, high, color=colour, alpha=0.15)
    for number, part in enumerate(decision.ranges[1:]):
        label = "another variant is the fastest from here on" if number == 0 else None
        axes.axvline(max(part.first, 1), color="grey", linewidth=0.7, linestyle="dotted", label=label)
    axes.set_yscale("log")
    axes.set_title("time of a call, µs, with the 95 % interval", fontsize=10)
    dress(axes, list(decision.sizes), "black")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)


def _place(decision: Decision, variant: str) -> float:
    """Return the least ratio, over all sizes, of a variant's time to the best time."""
    ratios = [
        seconds / min(decision.times_at(nbytes).values())
        for nbytes, seconds in zip(decision.sizes, decision.times_s[variant], strict=True)
        if seconds is not None
    ]
    return min(ratios, default=float("inf"))


class _Pair(NamedTuple):
    nbytes: int
    variant: str
    predicted_s: float
    measured_s: float


def _pairs(context: Context, decision: Decision, state: TunerState) -> list[_Pair]:
    """Return the predictions of the model beside the measured times."""
    return list(_each_pair(context, decision, state))


def _each_pair(context: Context, decision: Decision, state: TunerState) -> Iterator[_Pair]:
    for variant, times in decision.times_s.items():
        for nbytes, measured_s in zip(decision.sizes, times, strict=True):
            question = Question(context.collective, nbytes, context.ranks, context.link, dtype=context.dtype)
            try:
                predicted_s = candidate(parsed(variant), question, state, None, True).predicted_s
            except (NoAlgorithmError, UsageError):
                predicted_s = None
            if measured_s is not None and predicted_s:
                yield _Pair(nbytes, variant, predicted_s, measured_s)


def _draw_model(figure: Figure, pairs: Mapping[Context, Sequence[_Pair]]) -> None:
    axes = figure.add_subplot()
    for (context, of_context), colour in zip(pairs.items(), _COLOURS * len(pairs), strict=False):
        axes.scatter(
            [each.measured_s * 1e6 for each in of_context],
            [each.predicted_s * 1e6 for each in of_context],
            s=9,
            color=colour,
            label=_title(context),
        )
    every = [each for of_context in pairs.values() for each in of_context]
    if every:
        ends = [min(each.measured_s for each in every) * 1e6, max(each.measured_s for each in every) * 1e6]
        axes.plot(ends, ends, color="grey", linewidth=0.7, label="equal")
        error = median(abs(each.predicted_s / each.measured_s - 1) for each in every)
        axes.set_title(f"median error {error:.0%}", fontsize=10)
    axes.set(xscale="log", yscale="log", xlabel="measured µs", ylabel="predicted µs")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)


def _draw_regret(figure: Figure, pairs: Mapping[Context, Sequence[_Pair]]) -> None:
    axes = figure.add_subplot()
    every = list[float]()
    for (context, of_context), colour in zip(pairs.items(), _COLOURS * len(pairs), strict=False):
        points = {each.nbytes: [one for one in of_context if one.nbytes == each.nbytes] for each in of_context}
        regrets = [
            min(of, key=lambda one: one.predicted_s).measured_s / min(one.measured_s for one in of)
            for _, of in sorted(points.items())
        ]
        axes.plot(sorted(points), regrets, marker="o", markersize=3, color=colour, label=_title(context))
        every += regrets
    title = "time of the model's choice / time of the best"
    if every:
        title += f": geometric mean {geometric_mean(every):.3f}, largest {max(every):.2f}"
    axes.set_title(title, fontsize=10)
    dress(axes, sorted({pair.nbytes for of_context in pairs.values() for pair in of_context}), "black")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
