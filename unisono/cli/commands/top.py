"""``unisono top``: shows what the running jobs of this user on this host do, without their help."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.box import ROUNDED
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from unisono.cli.output.terminal import console
from unisono.postmortem.analysis import sentence
from unisono.postmortem.culprits import Finding, live_findings, ranks_text
from unisono.transports.recorder.activity import Activity, activity, seconds_text
from unisono.transports.recorder.live_ranks import LiveRank, live_ranks
from unisono.transports.recorder.live_stacks import stack

# The time between the two readings of `--once`, from which rates follow.
_ONCE_S = 0.5
_UNITS = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"))
_NOTHING = (
    "no job of this user runs on this host or in this container: unisono top shows ranks between unisono.init() and "
    "close()"
)


@click.command(short_help="Show what the running jobs on this host do, and who waits for whom.")
@click.argument("job", default="")
@click.option("--once", is_flag=True, help="Show the jobs once, and end.")
@click.option("--interval", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Seconds to refresh.")
@click.option("--stacks", is_flag=True, help="Show once where each rank is in the program.")
@click.option("--json", "as_json", is_flag=True, help="Write the jobs once, as JSON.")
def command(job: str, once: bool, interval: float, stacks: bool, as_json: bool) -> None:
    """Show the ranks of JOB, or of all jobs of this user on this host, until Ctrl-C.

    It only reads memory that the ranks publish, so it does not disturb them, and it sees ranks that are stuck. With
    --stacks the ranks get SIGUSR2, upon which each writes where it is, unless its program uses that signal.
    """
    if as_json or once or stacks:
        _show_once(job, stacks=stacks, as_json=as_json)
    else:
        _show(job, interval)


def _show_once(job: str, *, stacks: bool, as_json: bool) -> None:
    before = live_ranks(job)
    time.sleep(_ONCE_S)
    activities = _activities(live_ranks(job), before)
    by_pid = {pid: stack(pid) for pid in dict.fromkeys(each.rank.pid for each in activities)} if stacks else {}
    if as_json:
        values = [
            _values(each, by_pid, findings)
            for ranks in _by_job(activities).values()
            for findings in [_findings(ranks)]
            for each in ranks
        ]
        click.echo(json.dumps(values, indent=1))
        return
    terminal = console()
    terminal.print(_page(activities))
    for pid, text in by_pid.items():
        ranks = sorted({each.rank.snapshot.rank for each in activities if each.rank.pid == pid})
        terminal.print(f"{ranks_text(ranks)} (process {pid})", style="bold", highlight=False)
        terminal.print(text, highlight=False, markup=False)


def _show(job: str, interval: float) -> None:
    before = live_ranks(job)
    view = Live(Text("reading…"), console=console(), auto_refresh=False)
    with contextlib.suppress(KeyboardInterrupt), view as live:
        while True:
            time.sleep(interval)
            now = live_ranks(job)
            live.update(_page(_activities(now, before)), refresh=True)
            before = now


def _activities(now: Sequence[LiveRank], before: Sequence[LiveRank]) -> list[Activity]:
    earlier = {(rank.pid, rank.job): rank for rank in before}
    return [activity(rank, earlier.get((rank.pid, rank.job))) for rank in now]


def _page(activities: Sequence[Activity]) -> RenderableType:
    if not activities:
        return Text(_NOTHING)
    parts: list[RenderableType] = []
    for job, ranks in _by_job(activities).items():
        parts += [_table(job, ranks), *_said(ranks)]
    return Group(*parts)


def _by_job(activities: Sequence[Activity]) -> dict[str, list[Activity]]:
    jobs: dict[str, list[Activity]] = {}
    for each in activities:
        jobs.setdefault(each.rank.job, []).append(each)
    return jobs


def _said(activities: Sequence[Activity]) -> list[Text]:
    """Return a line about each rank that makes others wait."""
    return [Text(sentence(finding.text), style="yellow") for finding in _findings(activities)]


def _findings(activities: Sequence[Activity]) -> list[Finding]:
    return live_findings([each.rank for each in activities])


def _table(job: str, activities: Sequence[Activity]) -> Table:
    first = activities[0].rank.snapshot
    here = f", {len(activities)} of them here" if len(activities) < first.size else ""
    program = " ".join(map(str, first.about.get("program", ())))
    title = f"job {job}: {first.size} rank{'s' if first.size > 1 else ''}{here}; {program}"
    table = Table(box=ROUNDED, title=escape(title), title_justify="left")
    for heading in ("rank", "process", "does", "for", "waits for", "calls/s", "moves", "waiting"):
        table.add_column(heading)
    for each in activities:
        table.add_row(*_cells(each))
    return table


def _cells(each: Activity) -> tuple[str, ...]:
    style = "red" if each.rank.is_stopped else "yellow" if each.call is not None and each.since_s > 1 else ""
    does = "[dim]user code[/]" if each.call is None else escape(str(each.call))
    if each.rank.is_stopped:
        does = f"[red]stopped[/] {does}"
    return (
        str(each.rank.snapshot.rank),
        str(each.rank.pid),
        does,
        f"[{style}]{seconds_text(each.since_s)}[/]" if style else seconds_text(each.since_s),
        "" if each.waits_for is None else f"rank {each.waits_for}",
        "" if each.calls_per_s is None else f"{each.calls_per_s:,.0f}",
        ", ".join(f"{transport} {_rate(nbytes)}" for transport, nbytes in each.nbytes_per_s.items() if nbytes >= 1),
        "" if each.waiting is None else f"{each.waiting:.0%}",
    )


def _rate(nbytes_per_s: float) -> str:
    for unit, name in _UNITS:
        if nbytes_per_s >= unit:
            return f"{nbytes_per_s / unit:.3g} {name}"
    return f"{nbytes_per_s:.0f} B/s"


def _values(each: Activity, stacks: Mapping[int, str], findings: Sequence[Finding]) -> dict[str, Any]:
    snapshot = each.rank.snapshot
    return {
        "job": each.rank.job,
        "rank": snapshot.rank,
        "size": snapshot.size,
        "pid": each.rank.pid,
        "host": snapshot.about.get("host"),
        "program": snapshot.about.get("program"),
        "stopped": each.rank.is_stopped,
        "call": None if each.call is None else each.call.text,
        "site": None if each.call is None else each.call.site,
        "since_s": round(each.since_s, 6),
        "waits_for": each.waits_for,
        "last_call": None if each.last is None else each.last.text,
        "calls": snapshot.made,
        "calls_per_s": each.calls_per_s,
        "bytes_per_s": dict(each.nbytes_per_s),
        "waiting": each.waiting,
        "findings": [finding.text for finding in findings],
        **({"stack": stacks[each.rank.pid]} if stacks else {}),
    }
