"""Reports: pictures of a decision table and its measurements, as PNG files and as one HTML page that works offline.

For each context, the pictures show the fastest variant by size and its gain, and the times of variants with their
confidence intervals. They also show predictions against measurements, and the regret of the model's choices.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from unisono import html_page
from unisono.algorithms.catalogue.variants import parsed
from unisono.errors import NoAlgorithmError, UsageError
from unisono.tuning.decide.choice import Question, TunerState, candidate
from unisono.tuning.decide.table import Decision, Table
from unisono.tuning.machine.parameters import PRIORS, Parameters
from unisono.tuning.measure.measurement_log import Context, Measurement

_DPI = 100
_MOST_CURVES = 8


class Picture(NamedTuple):
    """A picture: its file name without the ending, its caption, and the PNG data."""

    name: str
    caption: str
    png: bytes


def write(table: Table, measurements: Sequence[Measurement], folder: Path, parameters: Parameters = PRIORS) -> Path:
    """Draw all pictures into `folder`, which is created if necessary, and return the path of the page.

    Raises:
        UsageError: matplotlib is not installed, the folder cannot be written, or the table is empty.
    """
    if not table.decisions:
        raise UsageError("the table has no decisions to draw")
    pictures = list(_pictures(table, measurements, TunerState(None, parameters)))
    page = folder / "index.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in pictures:
            (folder / f"{picture.name}.png").write_bytes(picture.png)
        page.write_text(_page(table, pictures), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the report cannot be written to {folder}: {error.strerror}") from None
    return page


def _pictures(table: Table, measurements: Sequence[Measurement], state: TunerState) -> Iterator[Picture]:
    yield Picture("winners", "The fastest variant by size", _drawn(_draw_winners, table))
    for number, (context, decision) in enumerate(table.decisions.items()):
        of_context = [each for each in measurements if each.context == context]
        name = f"curves-{number}-{context.collective}-{context.ranks}-{context.link}"
        yield Picture(name, f"Times: {_title(context)}", _drawn(_draw_curves, context, decision, of_context))
    pairs = {context: _pairs(context, decision, state) for context, decision in table.decisions.items()}
    yield Picture("model", "Predicted against measured times", _drawn(_draw_model, pairs))
    yield Picture("regret", "What the model alone would lose", _drawn(_draw_regret, pairs))


def _title(context: Context) -> str:
    return f"{context.collective}, {context.ranks} ranks by {context.link}, {context.dtype}"


def _drawn(draw: Any, *arguments: Any) -> bytes:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("pictures need matplotlib: pip install 'unisono[report]'") from None
    figure = Figure(figsize=(10, 5), layout="constrained")
    draw(figure, *arguments)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=_DPI)
    return file.getvalue()


def _draw_winners(figure: Any, table: Table) -> None:
    """Draw a row for each context, a cell for each size; the darker, the more the second best would cost."""
    figure.set_size_inches(12, 1.5 + 0.8 * len(table.decisions))
    axes = figure.add_subplot()
    sizes = sorted({nbytes for decision in table.decisions.values() for nbytes in decision.sizes})
    for row, decision in enumerate(table.decisions.values()):
        before = None
        for nbytes in decision.sizes:
            times = sorted(decision.times_at(nbytes).values())
            gain = min(1.0, times[1] / times[0] - 1.0) if len(times) > 1 else 0.0
            at = sizes.index(nbytes)
            axes.barh(row, 1, left=at, height=1, color=(1 - 0.6 * gain, 1 - 0.4 * gain, 1.0), edgecolor="white")
            name = decision.variant_at(nbytes) or ""
            if name != before:  # a new range begins here
                axes.text(at + 0.1, row, name.replace("(", "\n("), ha="left", va="center", fontsize=5, rotation=40)
            before = name
    axes.set_yticks(range(len(table.decisions)), [_title(context) for context in table.decisions], fontsize=7)
    axes.set_xticks([at + 0.5 for at in range(len(sizes))], [str(n) for n in sizes], rotation=60, fontsize=6)
    axes.set_xlabel("bytes; the darker, the slower is the second best (up to twice)")


def _draw_curves(figure: Any, context: Context, decision: Decision, own: Sequence[Measurement]) -> None:
    axes = figure.add_subplot()
    best = sorted(decision.times_s, key=lambda variant: _place(decision, variant))[:_MOST_CURVES]
    for variant in best:
        points = [(n, s) for n, s in zip(decision.sizes, decision.times_s[variant], strict=True) if s is not None]
        (line,) = axes.plot([n for n, _ in points], [s * 1e6 for _, s in points], marker=".", label=variant)
        band = sorted((each.nbytes, each.low_s * 1e6, each.high_s * 1e6) for each in own if each.variant == variant)
        if band:
            axes.fill_between(*(list(each) for each in zip(*band, strict=True)), color=line.get_color(), alpha=0.15)
    for part in decision.ranges[1:]:
        axes.axvline(part.first, color="grey", linewidth=0.5)
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="µs", title=_title(context))
    axes.legend(fontsize=7)


def _place(decision: Decision, variant: str) -> float:
    """Return the ratio of a variant's time to the best time, at the size where it is least."""
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
    pairs = list[_Pair]()
    for variant, times in decision.times_s.items():
        for nbytes, measured_s in zip(decision.sizes, times, strict=True):
            question = Question(context.collective, nbytes, context.ranks, context.link, dtype=context.dtype)
            try:
                predicted_s = candidate(parsed(variant), question, state, None, True).predicted_s
            except (NoAlgorithmError, UsageError):
                predicted_s = None
            if measured_s is not None and predicted_s:
                pairs.append(_Pair(nbytes, variant, predicted_s, measured_s))
    return pairs


def _draw_model(figure: Any, pairs: Mapping[Context, Sequence[_Pair]]) -> None:
    axes = figure.add_subplot()
    for context, of_context in pairs.items():
        axes.scatter(
            [each.measured_s * 1e6 for each in of_context],
            [each.predicted_s * 1e6 for each in of_context],
            s=8,
            label=_title(context),
        )
    every = [each for of_context in pairs.values() for each in of_context]
    if every:
        ends = [min(each.measured_s for each in every) * 1e6, max(each.measured_s for each in every) * 1e6]
        axes.plot(ends, ends, color="grey", linewidth=0.5)
        error = median(abs(each.predicted_s / each.measured_s - 1) for each in every)
        axes.set_title(f"median error {error:.0%}")
        axes.legend(fontsize=6)
    axes.set(xscale="log", yscale="log", xlabel="measured µs", ylabel="predicted µs")


def _draw_regret(figure: Any, pairs: Mapping[Context, Sequence[_Pair]]) -> None:
    axes = figure.add_subplot()
    every = list[float]()
    for context, of_context in pairs.items():
        points = {each.nbytes: [one for one in of_context if one.nbytes == each.nbytes] for each in of_context}
        regrets = [
            min(of, key=lambda one: one.predicted_s).measured_s / min(one.measured_s for one in of)
            for _, of in sorted(points.items())
        ]
        axes.plot(sorted(points), regrets, marker=".", label=_title(context))
        every += regrets
    if every:
        axes.set_title(f"geometric mean {geometric_mean(every):.3f}, largest {max(every):.2f}")
        axes.legend(fontsize=6)
    axes.set(xscale="log", xlabel="bytes", ylabel="time of the model's choice / time of the best")


def _page(table: Table, pictures: Sequence[Picture]) -> str:
    rows = [
        [html.escape(_title(context)), str(each.first), str(each.end or ""), html.escape(each.variant)]
        for context, decision in table.decisions.items()
        for each in decision.ranges
    ]
    images = "".join(
        f"<h2>{html.escape(each.caption)}</h2>"
        f'<img alt="{html.escape(each.caption)}" src="data:image/png;base64,{base64.b64encode(each.png).decode()}">'
        for each in pictures
    )
    decisions = html_page.table(["calls", "from, bytes", "below", "algorithm"], rows)
    return html_page.page("Tuning", f"{images}<h2>Decisions</h2>{decisions}")
