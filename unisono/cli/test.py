"""``unisono test``: random calls of every collective on local ranks, checked against numpy."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

import click
from rich.table import Table

from unisono.cli.terminal import console, progress
from unisono.errors import UnisonoError
from unisono.launchers.launch import Pool
from unisono.options import Options
from unisono.testing import Summary, check_collectives
from unisono.testing.check import SEEDS

if TYPE_CHECKING:
    from unisono.collectives.communicator import Communicator

# Cases from one step of the progress bar to the next, and the time that they have.
STEP = 50
STEP_TIMEOUT_S = 600.0


@click.command(short_help="Run random calls of every collective, and check what comes of them.")
@click.option("-n", "ranks", type=click.IntRange(min=1), default=2, show_default=True, help="Number of ranks.")
@click.option("--cases", type=click.IntRange(min=1), default=1000, show_default=True, help="Number of calls.")
@click.option("--seed", type=click.IntRange(0, SEEDS - 1), help="What the calls depend on; another one each time.")
@click.option("--transport", type=click.Choice(["shm", "tcp"]), default="shm", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
def command(*, ranks: int, cases: int, seed: int | None, transport: str, as_json: bool) -> int:
    """Run random calls of every collective on local ranks, and check what comes of them with numpy.

    The same calls are run again by the same --seed and -n. The first that goes wrong ends it, with a
    program that makes it again; the exit code is 1 then.
    """
    seed = random.SystemRandom().randrange(SEEDS) if seed is None else seed
    began = time.monotonic()
    summary, error = _run(ranks, cases, seed, transport)
    facts = {"ranks": ranks, "transport": transport, **dataclasses.asdict(summary)}
    if as_json:
        told = None if error is None else {"message": error.message, "program": getattr(error, "program", None)}
        click.echo(json.dumps({**facts, "seconds": time.monotonic() - began, "error": told}, indent=2))
    else:
        console().print(_table(summary))
        print(f"seed {seed}, {ranks} rank(s), {transport}")
    if error is not None:
        print(f"unisono: {error.message}", file=sys.stderr)
    return 0 if error is None else 1


def _run(ranks: int, cases: int, seed: int, transport: str) -> tuple[Summary, UnisonoError | None]:
    """Return what was found right until the first error, by steps, and that error."""
    tried: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    error: UnisonoError | None = None
    with progress() as bar, Pool(ranks, options=Options(transport=transport)) as pool:
        task = bar.add_task("", total=cases)
        for first in range(0, cases, STEP):
            numbers = range(first, min(first + STEP, cases))
            try:
                summary = pool.run(_check, numbers, seed, timeout_s=STEP_TIMEOUT_S)[0]
            except UnisonoError as wrong:
                error = wrong
                break
            tried.update(summary.cases)
            refused.update(summary.refused)
            bar.advance(task, len(numbers))
    return Summary(seed, dict(sorted(tried.items())), dict(sorted(refused.items()))), error


def _check(comm: Communicator, numbers: range, seed: int) -> Summary:
    return check_collectives(comm, cases=numbers, seed=seed)


def _table(summary: Summary) -> Table:
    table = Table("collective")
    table.add_column("right", justify="right")
    table.add_column("refused", justify="right")
    for collective, count in summary.cases.items():
        refused = summary.refused[collective]
        table.add_row(collective, str(count - refused), str(refused))
    table.add_section()
    refusals = sum(summary.refused.values())
    table.add_row("all", str(sum(summary.cases.values()) - refusals), str(refusals))
    return table
