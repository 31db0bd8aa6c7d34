"""``unisono postmortem``: says from the dumps of a job's ranks which rank did what wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click
from rich.box import ROUNDED
from rich.markup import escape
from rich.table import Table

from unisono.cli.options.outputs import OutputFile, write_text
from unisono.cli.output.terminal import console
from unisono.postmortem.analysis import Report, analyse
from unisono.postmortem.culprits import CallOfRanks, current, place
from unisono.postmortem.loading import load
from unisono.postmortem.page import html, state_text
from unisono.postmortem.torch_layout import write as write_torch_layout

# More ranks make a table too wide, so it shows only ranks that differ from the others.
_MOST_COLUMNS = 16


@click.command(short_help="Say from the dumps of a failed or hanging job which rank did what wrong.")
@click.argument("places", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--job", default="", metavar="ID", help="The job, where a directory has dumps of several.")
@click.option("--last", type=click.IntRange(min=1), default=12, show_default=True, help="Collectives to show.")
@click.option("--json", "as_json", is_flag=True, help="Write the report as JSON.")
@click.option("--html", "page", type=OutputFile(), help="Write a page with a timeline.")
@click.option(
    "--torch",
    "torch_directory",
    metavar="OUT",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the dumps for torch's analyser into an empty directory.",
)
def command(
    places: Sequence[Path], job: str, last: int, as_json: bool, page: Path | None, torch_directory: Path | None
) -> None:
    """Compare the dumps in DIR, and say which rank did what wrong.

    Each rank writes a dump into the directory in UNISONO_DUMP when its job fails, and when it gets SIGUSR1.
    """
    report = analyse(load(places, job), last)
    if page is not None:
        write_text(page, html(report))
    if torch_directory is not None:
        write_torch_layout(report.dumps, torch_directory)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1))
        return
    terminal = console()
    for note in report.dumps.notes:
        terminal.print(note, style="yellow", highlight=False, markup=False)
    terminal.print(report.summary, highlight=False, markup=False)
    terminal.print(_ranks(report))
    for communicator in dict.fromkeys(row.communicator for row in report.rows):
        terminal.print(_calls([row for row in report.rows if row.communicator == communicator]))


def _ranks(report: Report) -> Table:
    table = Table("rank", "host", "process", "in the call", "in the program", box=ROUNDED, title="Where each rank is")
    for rank in range(report.dumps.size):
        dump = report.dumps.by_rank.get(rank)
        if dump is None:
            table.add_row(str(rank), "", "", "[red]no dump[/]", "")
        else:
            host = str(dump.snapshot.about.get("host", ""))
            table.add_row(str(rank), host, str(dump.snapshot.pid), escape(str(current(dump) or "none")), place(dump))
    return table


def _calls(rows: Sequence[CallOfRanks]) -> Table:
    ranks = list(rows[0].by_rank)
    shown = [rank for rank in ranks if _is_odd(rows, rank)][:_MOST_COLUMNS] if len(ranks) > _MOST_COLUMNS else ranks
    name = "all ranks" if not rows[0].communicator else f"ranks {', '.join(map(str, ranks))}"
    hidden = len(ranks) - len(shown)
    others = f"; {hidden} ranks that made the same calls are left out" if hidden else ""
    table = Table("#", "call", *(f"rank {rank}" for rank in shown), box=ROUNDED, title=f"Calls of {name}{others}")
    for row in rows:
        table.add_row(str(row.sequence), escape(row.text), *(_cell(row, rank) for rank in shown))
    return table


def _is_odd(rows: Sequence[CallOfRanks], rank: int) -> bool:
    """Return whether a rank has not ended all these calls, or made another one."""
    calls = [(row, row.by_rank[rank]) for row in rows]
    return any(call is None or call.state != "done" or call.text != row.text for row, call in calls)


_STYLES = {"running": "yellow", "failed": "red", "done": "default"}


def _cell(row: CallOfRanks, rank: int) -> str:
    call = row.by_rank[rank]
    if call is None:
        return "[red]not called[/]" if rank in row.absent else "earlier"
    text = state_text(call.state, call.ended_ns - call.called_ns if call.ended_ns else None)
    if call.text != row.text:
        text = f"[red]{escape(call.text)}[/] {text}"
    return f"[{_STYLES[call.state]}]{text}[/]"
