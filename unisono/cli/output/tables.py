"""Shows and merges decision tables; the subcommands ``show``, ``merge``, ``diff``, ``lint`` and ``report`` of tune."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from rich.table import Table as RichTable

from unisono import __version__
from unisono.bench.sizes import format_size
from unisono.cli.options.loading import load_option
from unisono.cli.options.outputs import PICTURES, OutputFile
from unisono.cli.output.terminal import add_names, console
from unisono.tuning.decide.lint import lint
from unisono.tuning.decide.table import Table, differences, loaded
from unisono.tuning.machine.fingerprint import fingerprint
from unisono.tuning.measure.calibration_files import parameters_of
from unisono.tuning.measure.measurement_log import MeasurementStore, merged
from unisono.tuning.measure.table_files import compile_table, log_of, measurements_of


def shown_table(table: Table) -> RichTable:
    """Return the decisions of a table for people, with the machine, the dates and the load in the title."""
    shown = RichTable(title="\n".join(["Decisions", *_machines_of(table)]), title_justify="left")
    machines = {context.machine for context in table.decisions}
    if len(machines) > 1:
        shown.add_column("machine")
    for heading in ("collective", "ranks", "transport", "dtype", "from size"):
        shown.add_column(heading, justify="right" if heading in ("ranks", "from size") else "left", overflow="fold")
    variants = {each.variant for decision in table.decisions.values() for each in decision.ranges}
    add_names(shown, "algorithm", variants)
    shown.add_column("µs at that size", justify="right")
    for context, decision in table.decisions.items():
        for part in decision.ranges:
            seconds = decision.times_at(max(part.first, decision.sizes[0])).get(part.variant)
            time = "" if seconds is None else f"{seconds * 1e6:.1f}"
            where = (context.collective, str(context.ranks), context.link, _DTYPES.get(context.dtype, context.dtype))
            machine = (context.machine,) if len(machines) > 1 else ()
            shown.add_row(*machine, *where, format_size(part.first), part.variant, time)
    return shown


def _machines_of(table: Table) -> list[str]:
    """Return a line for each machine in a table."""
    machines = {context.machine for context in table.decisions}
    return [_described(name, table.machines.get(name, {})) for name in sorted(machines)]


def _described(machine: str, about: Mapping[str, Any]) -> str:
    """Return a line that describes a machine in a table."""
    parts = [f"machine {machine}"]
    if about.get("processor"):
        parts.append(f"{about['processor']}, {about.get('cores')} cores")
    with suppress(KeyError, TypeError):  # people may have edited the table
        parts.append(f"measured {_span([str(date)[:16].replace('T', ' ') for date in about['measured']])} UTC")
    with suppress(KeyError, TypeError, ValueError):
        parts.append(f"at a load of {_span([f'{load:.1f}' for load in about['load']])}")
    return ", ".join(parts)


def _span(ends: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys(ends))


# The classes of dtypes in words: those that are combined in a wider dtype, and the others.
_DTYPES = {"narrow": "float16 and narrower", "plain": "float32 and others"}
_TABLE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("show")
@click.argument("path", type=_TABLE, metavar="TABLE")
@load_option
def show(path: Path) -> None:
    """Show the decisions of a table."""
    console().print(shown_table(loaded(path, is_used_here=False)))


@click.command("merge")
@click.argument("paths", type=_TABLE, nargs=-1, required=True, metavar="TABLE...")
@click.option("--out", type=OutputFile(), required=True, help="The table to write.")
def merge(paths: tuple[Path, ...], out: Path) -> None:
    """Combine the measurements of several tables, and write one table of them.

    Decisions of different machines stay side by side: a job takes those of its machine. Times of one machine are
    averaged, each weighted by its number of rounds. The measurements of a table are in a file next to it, with the
    ending .jsonl. You may also name such a file itself. Without that file, the times in the table count, as one round.
    """
    together = list(merged(measurements_of(path) for path in paths))
    target = MeasurementStore(log_of(out))
    old = set(target.read()) if target.path.exists() else set()
    target.append([each for each in together if each not in old])
    compile_table(out, target.read(), __version__, [path.with_suffix(".json") for path in paths])


@click.command("diff")
@click.argument("first", type=_TABLE)
@click.argument("second", type=_TABLE)
@load_option
def diff(first: Path, second: Path) -> int:
    """Show where two tables choose differently. The exit code is 1 if they do."""
    lines = differences(loaded(first, is_used_here=False), loaded(second, is_used_here=False))
    for line in lines:
        click.echo(line)
    return 1 if lines else 0


@click.command("lint")
@click.argument("path", type=_TABLE, metavar="TABLE")
@load_option
def lint_(path: Path) -> int:
    """Find implausible times in a table, such as an allreduce slower than a reduce and a broadcast.

    The exit code is 1 if there are any.
    """
    suspicions = lint(loaded(path))
    for suspicion in suspicions:
        click.echo(suspicion.text)
    return 1 if suspicions else 0


@click.command("report")
@click.argument("path", type=_TABLE, metavar="TABLE")
@click.option("--out", type=PICTURES, required=True, help="The folder to write to.")
@load_option
def report_(path: Path, out: Path) -> None:
    """Draw a table and its measurements as one HTML page that works offline."""
    from unisono.cli.output.tune_report import write

    store, table = MeasurementStore(log_of(path)), loaded(path)
    measurements = store.read() if store.path.exists() else []
    page = write(table, _machines_of(table), measurements, out, parameters_of(fingerprint()))
    click.echo(str(page))


COMMANDS = (show, merge, diff, lint_, report_)
