"""``unisono import``: proves a schedule of another program, and shows its cost beside those of other algorithms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
from rich.table import Table

from unisono.algorithms.catalogue.algorithm import Cost
from unisono.algorithms.catalogue.registry import candidates_of
from unisono.algorithms.schedules.proving import Loaded
from unisono.cli.output.terminal import add_names, console
from unisono.collectives.bootstrap.user_algorithms import load_schedule

# How many other algorithms the table has.
_SHOWN = 8


@click.command(short_help="Prove a schedule of MSCCL or MSCCL++, and show its cost beside other algorithms.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--name", help="Name of the algorithm.  [default: that in the file]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
def command(*, file: Path, name: str | None, as_json: bool) -> None:
    """Prove the schedule in FILE, and show its cost beside those of other algorithms.

    FILE is XML of MSCCL, or a JSON execution plan of MSCCL++. The exit code is 1 if the schedule is
    wrong, and the error names the rank, the step and the chunk. A program uses the schedule by
    un.algorithm.load(FILE), or any program by UNISONO_LOAD=FILE.

    For example: unisono import allpairs.xml && unisono show allreduce allpairs -n 8 --load allpairs.xml
    """
    loaded = load_schedule(file, name=name, replace=True)
    if as_json:
        click.echo(json.dumps(_facts(loaded), indent=2))
        return
    terminal = console()
    terminal.print(f"{loaded.collective} {loaded.name} for {loaded.size} ranks: proved", style="bold", highlight=False)
    terminal.print(_table(loaded))
    variable = f"UNISONO_LOAD={file} UNISONO_ALGORITHM={loaded.name}"
    terminal.print(f"to run it: un.algorithm.load({str(file)!r}), or {variable}", highlight=False, soft_wrap=True)


def _table(loaded: Loaded) -> Table:
    """Return the cost of the schedule, and of the other algorithms that have the least cost for its number of ranks."""
    table = Table()
    others = sorted(_others(loaded), key=lambda named: (named[1].rounds, named[1].sent))[:_SHOWN]
    costs = [(loaded.name, loaded.cost), *others]
    add_names(table, "algorithm", [name for name, _ in costs])
    for heading in ("rounds", "sent", "reduced", "stored"):
        table.add_column(heading, justify="right")
    for name, cost in costs:
        stored = "" if cost.stored is None else f"{cost.stored:.4g}·n"
        style = "bold" if name == loaded.name else ""
        table.add_row(name, str(cost.rounds), f"{cost.sent:.4g}·n", f"{cost.reduced:.4g}·n", stored, style=style)
    return table


def _others(loaded: Loaded) -> Iterator[tuple[str, Cost]]:
    for algorithm in candidates_of(loaded.collective).values():
        if algorithm.name != loaded.name and not algorithm.vendor and algorithm.supports(loaded.size) is None:
            cost = algorithm.cost_of(loaded.size, {})
            if cost is not None:
                yield algorithm.name, cost


def _facts(loaded: Loaded) -> dict[str, object]:
    report = loaded.report
    return {
        **{"collective": loaded.collective, "algorithm": loaded.name, "size": loaded.size},
        **{"rounds": report.rounds, "messages": report.messages, "most_messages": report.most_messages},
        **{"sent": float(report.sent), "reduced": float(report.reduced), "stored": float(report.stored)},
        **{"same_bits": report.same_bits, "in_place": loaded.in_place},
    }
