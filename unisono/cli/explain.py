"""``unisono explain``: which algorithm a call would use, and why. Nothing is run."""

from __future__ import annotations

import dataclasses
import json

import click
from rich.console import Console
from rich.table import Table

from unisono.options import parse_nbytes
from unisono.tuning.choice import Explanation, Question, explain
from unisono.tuning.model import LINKS


def _nbytes(context: click.Context, parameter: click.Parameter, text: str) -> int:
    try:
        return parse_nbytes(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not {error}.") from None


@click.command(short_help="Tell which algorithm is chosen for a call, and why.")
@click.argument("collective")
@click.option("-n", "size", type=click.IntRange(min=1), default=2, show_default=True, help="Number of ranks.")
@click.option("--size", "nbytes", default="1M", show_default=True, callback=_nbytes, help="Bytes of the vector.")
@click.option("--link", type=click.Choice(list(LINKS)), default="shm", show_default=True, help="Between the ranks.")
@click.option("--algorithm", default="auto", show_default=True, help="Force an algorithm by name.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
def command(*, collective: str, size: int, nbytes: int, link: str, algorithm: str, as_json: bool) -> None:
    """Tell which algorithm carries out COLLECTIVE, and why; for example: unisono explain allreduce -n 4 --size 1M."""
    found = explain(Question(collective, nbytes, size, link, algorithm=algorithm))
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        Console().print(_table(found))


def _table(found: Explanation) -> Table:
    asked, choice = found.question, found.choice
    title = (
        f"{asked.collective}, {asked.nbytes} B, {asked.size} ranks by {asked.link}: {choice.algorithm} ({choice.tier})"
    )
    table = Table(title=title)
    for heading in ("", "algorithm", "predicted µs", "segments", "refused because"):
        table.add_column(heading, justify="right" if heading in ("predicted µs", "segments") else "left")
    for candidate in found.candidates:
        chosen = "*" if candidate.algorithm == choice.algorithm else ""
        predicted = "" if candidate.predicted_s is None else f"{candidate.predicted_s * 1e6:.1f}"
        table.add_row(chosen, candidate.algorithm, predicted, str(candidate.segments), candidate.refusal or "")
    return table
