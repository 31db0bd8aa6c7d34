"""``unisono trace``: merges the traces of ranks into one that Perfetto shows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from unisono.cli.groups import SuggestingGroup
from unisono.cli.options.outputs import OutputFile
from unisono.errors import UsageError
from unisono.foundation.json_checks import text_of_file
from unisono.options import variable
from unisono.postmortem.culprits import ranks_text
from unisono.transports.recorder import traces
from unisono.transports.recorder.clocks import facts_of, measured
from unisono.transports.recorder.memory import job_name

_DEFAULT = "trace.json"
_NO_TRACES = f": set {variable('trace')} to it before the job, unless the program passes the option trace"


@click.group(cls=SuggestingGroup, short_help="Merge the traces of a job's ranks.")
def command() -> None:
    """Work with traces, which ranks write to the directory in UNISONO_TRACE, and by world.trace(path)."""


@command.command(short_help="Merge the traces in a directory into one file.")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("-o", "--output", type=OutputFile(), help=f"[default: DIRECTORY/{_DEFAULT}]")
@click.option("--job", default="", metavar="ID", help="The job, where the directory has traces of several.")
def merge(directory: Path, output: Path | None, job: str) -> None:
    """Merge the traces of all ranks in DIRECTORY into one file. Open it at https://ui.perfetto.dev.

    All ranks are on one clock, by offsets that they have measured: see the documentation of traces.
    """
    by_job: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(directory.glob("*.trace.json")):
        trace = _read(path)
        by_job.setdefault(job_name(trace["otherData"]), []).append(trace)
    jobs = [name for name in by_job if name.startswith(job)]
    if not jobs:
        known = f": there are {', '.join(by_job)}" if by_job else _NO_TRACES
        raise UsageError(f"there are no traces{f' of job {job!r}' if job else ''} in {str(directory)!r}{known}")
    if len(jobs) > 1:
        raise UsageError(f"there are traces of the jobs {', '.join(jobs)} in {str(directory)!r}: pick one by --job")
    parts = by_job[jobs[0]]
    events = traces.merged(parts)
    of_ranks = {part["otherData"]["rank"]: part["otherData"] for part in parts}
    facts: dict[str, Any] = {"format": traces.FORMAT, "job": jobs[0], "ranks": sorted(of_ranks)}
    clocks = {rank: measured(about) for rank, about in of_ranks.items()}
    facts["clocks"] = {rank: facts_of(clock) for rank, clock in clocks.items()}
    target = output or directory / _DEFAULT
    try:
        traces.write_events(events, facts, target)
    except OSError as error:
        raise UsageError(f"{str(target)!r} cannot be written: {error.strerror}") from None
    lost = sum(part["otherData"]["calls_lost"] for part in parts)
    click.echo(f"{target}: {len(parts)} ranks, {len(events)} events; open it at https://ui.perfetto.dev")
    click.echo(_said_of(clocks))
    if lost:
        click.echo(f"{lost} earlier calls are not in it: UNISONO_RECORDED_CALLS sets how many are kept")


def _said_of(clocks: Mapping[int, tuple[int, int] | None]) -> str:
    """Return a sentence on how well the clocks of the ranks are aligned."""
    unknown = [rank for rank, clock in clocks.items() if clock is None]
    if unknown:
        return f"{ranks_text(unknown)} could not compare clocks with rank 0, and keep the time of day of their hosts"
    worst_ns = max(uncertainty for clock in clocks.values() if clock for uncertainty in clock[1:])
    if not worst_ns:
        return "all ranks have the same clock"
    return f"the clocks of the hosts are aligned to {worst_ns / 1e3:.0f} µs"


def _read(path: Path) -> dict[str, Any]:
    try:
        return traces.parsed(text_of_file(path))
    except ValueError as error:
        raise UsageError(f"{str(path)!r} is no trace of Unisono, or only a part of one: {error}") from None
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror}") from None
