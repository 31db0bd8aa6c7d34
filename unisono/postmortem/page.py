"""The report as one HTML page, which needs no other file and no network."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from unisono.foundation.html_page import page
from unisono.postmortem.analysis import Report, sentence
from unisono.postmortem.culprits import CallOfRanks, current, place
from unisono.postmortem.timeline import Bar, timeline

_WIDTH = 1000
_TRACK = 26
_LEFT = 70
_COLOURS = {"done": "#3b7dd8", "running": "#e0a020", "failed": "#c8402f"}

_STYLE = """.summary { background: #f4f4f0; border-left: 4px solid #c8402f; padding: .8em 1em }
td.done { background: #e9f1fc } td.running { background: #fcf1d9 } td.failed { background: #f9e0dc }
td.missing { background: #f4f4f0; color: #777 } svg text { font: 12px system-ui, sans-serif } svg { max-width: none }
rect.idle { fill: #f9e0dc; stroke: #c8402f; stroke-dasharray: 4 3 }
"""
_BODY = """<p class="summary" id="summary">{summary}</p>
{notes}
<h2>Where each rank is</h2>
<div class="scroll"><table id="ranks">
<tr><th>rank</th><th>host</th><th>process</th><th>call</th><th>in the program</th></tr>
{ranks}</table></div>
<h2>The last calls on one clock</h2>
<p>Each bar is a call; point at it for its text. A dashed bar is the time in which a rank, for which others wait, has
not called. Time is in seconds before the last dump.</p>
<div class="scroll">{timeline}</div>
<h2>Call by call</h2>
<div class="scroll">{rows}</div>"""


def html(report: Report) -> str:
    """Return the page."""
    dumps = report.dumps
    body = _BODY.format(
        summary=escape(report.summary),
        notes="".join(f"<p>{escape(note)}</p>" for note in dumps.notes),
        ranks="\n".join(_rank(report, rank) for rank in range(dumps.size)),
        timeline=_timeline(list(timeline(dumps)), dumps.size, _culprits(report)),
        rows="\n".join(_table([row for row in report.rows if row.communicator == each]) for each in _order(report)),
    )
    return page(f"Postmortem of job {dumps.job}", body, _STYLE)


def _rank(report: Report, rank: int) -> str:
    dump = report.dumps.by_rank.get(rank)
    if dump is None:
        return f'<tr><td>{rank}</td><td class="missing" colspan="4">no dump</td></tr>'
    call, about = current(dump), dump.snapshot.about
    cells = (str(rank), str(about.get("host", "")), str(dump.snapshot.pid), str(call or "none"), place(dump))
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _culprits(report: Report) -> dict[int, str]:
    """Return the ranks that the findings name, each with the text of its first finding."""
    texts = dict[int, str]()
    for finding in report.findings:
        for rank in finding.ranks:
            texts.setdefault(rank, sentence(finding.text))
    return texts


def _timeline(bars: list[Bar], size: int, culprits: Mapping[int, str]) -> str:
    begin_s = min((bar.begin_s for bar in bars), default=-1.0)
    scale = (_WIDTH - _LEFT - 10) / max(-begin_s, 1e-9)
    height = _TRACK * size + 30
    parts = [f'<svg id="timeline" width="{_WIDTH}" height="{height}" role="img" aria-label="timeline of calls">']
    for rank in range(size):
        style = ' fill="#c8402f" font-weight="bold"' if rank in culprits else ""
        parts.append(f'<text x="0" y="{rank * _TRACK + 17}"{style}>rank {rank}</text>')
    for bar in bars:
        x, width = _LEFT + (bar.begin_s - begin_s) * scale, max((bar.end_s - bar.begin_s) * scale, 1.0)
        shape = f'x="{x:.1f}" y="{bar.rank * _TRACK + 4}" width="{width:.1f}" height="{_TRACK - 8}"'
        title = f"{bar.call}: {bar.call.state} after {_duration(bar.end_s - bar.begin_s)}"
        parts.append(f'<rect {shape} fill="{_COLOURS[bar.call.state]}"><title>{escape(title)}</title></rect>')
    for rank, text in culprits.items():
        idle_s = max((bar.end_s for bar in bars if bar.rank == rank), default=begin_s)
        x, width = _LEFT + (idle_s - begin_s) * scale, -idle_s * scale
        shape = f'x="{x:.1f}" y="{rank * _TRACK + 4}" width="{width:.1f}" height="{_TRACK - 8}"'
        parts.append(f'<rect class="idle" {shape}><title>{escape(text)}</title></rect>')
    for step in range(5):
        at_s = begin_s * (4 - step) / 4 if step < 4 else 0
        x = _LEFT + (at_s - begin_s) * scale
        anchor = "end" if step == 4 else "start"
        parts.append(f'<text x="{x:.1f}" y="{height - 8}" text-anchor="{anchor}">{at_s:.3g} s</text>')
    return "".join([*parts, "</svg>"])


def _order(report: Report) -> list[int]:
    return list(dict.fromkeys(row.communicator for row in report.rows))


def _table(rows: list[CallOfRanks]) -> str:
    ranks = list(rows[0].by_rank)
    name = "all ranks" if not rows[0].communicator else f"communicator of ranks {', '.join(map(str, ranks))}"
    head = "".join(f"<th>rank {rank}</th>" for rank in ranks)
    lines = [f'<table class="calls"><caption>{escape(name)}</caption><tr><th>#</th><th>call</th>{head}</tr>']
    for row in rows:
        cells = []
        for rank, call in row.by_rank.items():
            if call is None:
                cells.append(f'<td class="missing">{"not called" if rank in row.absent else "earlier"}</td>')
            else:
                shown = state_text(call.state, call.ended_ns - call.called_ns if call.ended_ns else None)
                other = "" if call.text == row.text else f" {call.text}"
                cells.append(f'<td class="{call.state}" title="{escape(call.site)}">{escape(shown + other)}</td>')
        lines.append(f"<tr><td>{row.sequence}</td><td>{escape(row.text)}</td>{''.join(cells)}</tr>")
    return "".join([*lines, "</table>"])


def state_text(state: str, took_ns: int | None) -> str:
    """Return the state of a call, with the time that it took if it has ended: "12.3 µs"."""
    return state if took_ns is None or state != "done" else _duration(took_ns / 1e9)


def _duration(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
