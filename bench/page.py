"""A benchmark as one HTML page: curves, the ratios as a heat map, the machine and the versions."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from unisono.bench.curves import Benchmark, by_placement, picture
from unisono.bench.sizes import format_size
from unisono.foundation.html_page import page, table

# A ratio of this or more has the strongest colour.
_STRONGEST = 4.0


def html(document: Mapping[str, Any]) -> str:
    """Return the page of a benchmark in the form of `unisono bench --out`."""
    parts = [_facts(document)]
    for benchmark in by_placement(document):
        parts += [f"<h2>{escape(benchmark.title)}</h2>", _curves(benchmark), _ratios(benchmark)]
    failures = [row for row in document["rows"] if row["failure"]]
    if failures:
        rows = [[escape(row["library"]), format_size(row["nbytes"]), escape(row["failure"])] for row in failures]
        parts += ["<h2>Failures</h2>", table(["library", "size", "reason"], rows)]
    title = f"{document['collective']} of {document['dtype']}, {document['ranks']} ranks"
    return page(title, "\n".join(parts))


def _facts(document: Mapping[str, Any]) -> str:
    machine, versions = document["machine"], document["versions"]
    facts = {
        "date": document["date"],
        **machine,
        "load before": document["load"],
        "binding": document["bind"],
        **versions,
    }
    return table(["fact", "value"], [[escape(name), escape(str(value))] for name, value in facts.items()])


def _curves(benchmark: Benchmark) -> str:
    if not benchmark.libraries or not any(row["nbytes"] for row in benchmark.rows):
        return ""
    text = io.StringIO()
    picture(benchmark).savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]


def _ratios(benchmark: Benchmark) -> str:
    """Return the table of times, whose cells are coloured by the ratio to Unisono's first variant."""
    libraries = list(dict.fromkeys(str(row["library"]) for row in benchmark.rows))
    rows = {(row["nbytes"], row["library"]): row for row in benchmark.rows}
    sizes = sorted({row["nbytes"] for row in benchmark.rows})
    cells = [
        [format_size(size), *(_cell(rows.get((size, name)), libraries[0]) for name in libraries)] for size in sizes
    ]
    note = (
        f"<p>Median time of a call in µs, and how many times as long as {escape(libraries[0])}, paired by round, with "
        "its 95 % interval. Green: Unisono is faster. Red: the other library is.</p>"
    )
    return note + table(["size", *libraries], cells)


def _cell(row: Mapping[str, Any] | None, baseline: str) -> str:
    if row is None:
        return "–"
    ratio = row["ratios"].get(baseline)
    if ratio is None:
        return f"{row['median_us']:.3g}"
    text = f"{row['median_us']:.3g} · {ratio['value']:.2f} [{ratio['low']:.2f}–{ratio['high']:.2f}]"
    return f'<div style="background: {_colour(ratio["value"])}; padding: 0 .4em">{text}</div>'


def _colour(ratio: float) -> str:
    """Return green for a ratio above 1, red for one below, and white at 1."""
    strength = min(1.0, abs(math.log(ratio)) / math.log(_STRONGEST))
    strong: Sequence[int] = (120, 190, 120) if ratio > 1 else (225, 120, 110)
    return "#" + "".join(f"{round(255 + (part - 255) * strength):02x}" for part in strong)
