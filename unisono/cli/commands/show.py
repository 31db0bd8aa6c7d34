"""``unisono show``: shows the schedule of an algorithm for each rank, in the terminal or as a picture, and its cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.box import ROUNDED
from rich.table import Table

from unisono.algorithms.builders.arguments import check_ranks
from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.catalogue.registry import find
from unisono.algorithms.ir.drawing import DrawnGroup, legend, lines, rows
from unisono.algorithms.ir.plan import Plan
from unisono.cli.options.completion import algorithms as complete_algorithms, collectives as complete_collectives
from unisono.cli.options.loading import load_option
from unisono.cli.options.outputs import PICTURE
from unisono.cli.output.terminal import console
from unisono.errors import UsageError

SIDE_BY_SIDE = 16


@click.command(short_help="Show the schedule of an algorithm and its cost.")
@click.argument("collective", shell_complete=complete_collectives)
@click.argument("algorithm", shell_complete=complete_algorithms)
@click.option("-n", "size", type=int, default=8, show_default=True, help="Number of ranks.")
@click.option("--rank", type=int, help=f"Show only this rank.  [default: all up to {SIDE_BY_SIDE} ranks, else rank 0]")
@click.option("--root", type=int, default=0, show_default=True, help="Root of the collective.")
@click.option("--segments", type=click.IntRange(min=1), default=1, show_default=True, help="Segments of each block.")
@click.option("--param", "params", multiple=True, metavar="NAME=VALUE", help="Parameter of the algorithm: radix=4.")
@click.option("--svg", type=PICTURE, help="Draw into this file.")
@click.option("--png", type=PICTURE, help="Draw into this file.")
@load_option
def command(
    collective: str,
    algorithm: str,
    size: int,
    rank: int | None,
    root: int,
    segments: int,
    params: tuple[str, ...],
    svg: Path | None,
    png: Path | None,
) -> None:
    """Show the steps of each rank when ALGORITHM runs COLLECTIVE; for example: unisono show allreduce ring -n 8."""
    definition = find(collective, algorithm)
    arguments = given_parameters(definition, params)
    check_ranks(size, rank or 0, root)
    definition.check_supports(size)
    shown = [rank] if rank is not None else range(size) if size <= SIDE_BY_SIDE else [0]
    plans = [definition.build(size, each, root, **arguments) for each in shown]
    schedule = rows(plans, segments)
    title = " ".join([collective, algorithm, *params, f"on {size} rank{'s' if size > 1 else ''}"])
    terminal = console()
    terminal.print(title, style="bold", highlight=False)
    terminal.print(_table(plans, schedule))
    for line in (*legend(schedule), *_facts(definition, size, arguments)):
        terminal.print(line, highlight=False)
    for path, kind in ((svg, "svg"), (png, "png")):
        if path:
            _draw(path, kind, title, plans, schedule)


# By the type of a parameter's default: the function that reads its text, and a description of the text.
_FORMS: dict[type, tuple[Callable[[str], Any], str]] = {
    int: (int, "N, with a whole number"),
    bool: ({"0": False, "1": True}.__getitem__, "0 or 1"),
    str: (str, "NAME"),
}


def given_parameters(algorithm: Algorithm, params: Sequence[str]) -> dict[str, Any]:
    """Return the builder's parameters that the command line has as NAME=VALUE.

    Raises:
        UsageError: the builder has no such parameter, or its value is not valid or cannot be written as text.
    """
    texts = {name: value for name, _, value in (text.partition("=") for text in params)}
    algorithm.check_parameters(texts)
    arguments = {}
    for name, value in texts.items():
        kind = type(algorithm.parameters()[name].default)
        if kind not in _FORMS:
            raise UsageError(f"{algorithm.collective} {algorithm.name} takes {name!r} from programs only")
        read, form = _FORMS[kind]
        try:
            arguments[name] = read(value)
        except (KeyError, ValueError):
            raise UsageError(f"'{name}={value}' is not of the form {name}={form}") from None
    return arguments


def _table(plans: Sequence[Plan], schedule: Sequence[DrawnGroup]) -> Table:
    """Return a table with a row for each group and a column for each plan."""
    heads = [
        name
        for name in ("lane", "group", "segment")
        if name == "group" or len({getattr(row, name) for row in schedule}) > 1
    ]
    table = Table(show_lines=True, box=ROUNDED, padding=0)
    for head in heads:
        table.add_column(head, justify="right")
    for plan in plans:
        table.add_column(f"rank {plan.rank}")
    for row in schedule:
        cells = ["\n".join(lines(plan, group)) for plan, group in zip(plans, row.groups, strict=True)]
        table.add_row(*(str(getattr(row, head)) for head in heads), *cells)
    return table


def _facts(algorithm: Algorithm, size: int, params: dict[str, Any]) -> list[str]:
    cost = algorithm.cost_of(size, params)
    text = "not declared"
    if cost is not None:
        rounds = f"{cost.rounds} round{'' if cost.rounds == 1 else 's'}"
        text = f"{rounds}; the busiest rank sends {cost.sent:.4g}·n and combines {cost.reduced:.4g}·n"
    return [f"cost for a vector of n: {text}", f"reference: {algorithm.reference}"]


def _draw(path: Path, kind: str, title: str, plans: Sequence[Plan], schedule: Sequence[DrawnGroup]) -> None:
    from unisono.cli.output.schedule_picture import Panel, picture

    picture([Panel(title, plans, schedule)]).savefig(path, format=kind, dpi=150)
