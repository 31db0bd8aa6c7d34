"""``unisono verify``: proves the algorithms that a file registers, or all algorithms."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.table import Table

from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.catalogue.registration import prove
from unisono.algorithms.catalogue.registry import ALGORITHMS, algorithms_of
from unisono.algorithms.ir.drawing import ranges
from unisono.algorithms.verifier.verify import Report
from unisono.cli.messages import tell
from unisono.cli.output.terminal import add_names, console, progress
from unisono.collectives.bootstrap.user_algorithms import load
from unisono.errors import PlanError, UsageError

HEADINGS = ("sizes", "messages", "rounds", "sent", "reduced", "scratch", "bits", "", "seconds")
LONGEST = 16
RIGHT = ("messages", "rounds", "sent", "reduced", "scratch", "seconds")


@dataclass(frozen=True, slots=True)
class ProofResult:
    """The result for one algorithm: a report for each number of ranks that was proved, up to the first `error`."""

    algorithm: Algorithm
    reports: dict[int, Report]
    error: str | None
    seconds: float


@click.command(short_help="Prove the algorithms that a file registers, or all algorithms.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@click.option("--all", "everything", is_flag=True, help="Prove all algorithms, including those of installed packages.")
@click.option("--max-size", type=click.IntRange(min=1), default=32, show_default=True, help="Largest number of ranks.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
def command(*, file: Path | None, everything: bool, max_size: int, as_json: bool) -> int:
    """Prove the algorithms that FILE registers, for every number of ranks up to --max-size.

    FILE is run, but not as __main__. Costs are shown for the largest number of ranks. Scratch is
    shown as the number of blocks in use at a time, of all its blocks. The exit code is 1 if an
    algorithm is wrong, and a picture shows the place.
    """
    if everything == (file is not None):
        raise UsageError("verify needs either FILE or --all: pass one of them")
    outcomes = _prove(load(str(file)) if file else _all(), max_size)
    if as_json:
        click.echo(json.dumps([_facts(outcome) for outcome in outcomes], indent=2))
    else:
        console().print(_table(outcomes))
    wrong = [outcome.error for outcome in outcomes if outcome.error]
    for error in wrong:
        tell(str(error))
    return 1 if wrong else 0


def _all() -> list[Algorithm]:
    return [algorithm for collective in ALGORITHMS for algorithm in algorithms_of(collective).values()]


def _prove(algorithms: Sequence[Algorithm], max_size: int) -> list[ProofResult]:
    with progress() as bar:
        task = bar.add_task("", total=len(algorithms) * max_size)
        outcomes = []
        for number, algorithm in enumerate(algorithms):
            bar.update(task, completed=number * max_size, description=f"{algorithm.collective} {algorithm.name}")
            outcomes.append(_prove_one(algorithm, max_size, lambda: bar.advance(task)))
        return outcomes


def _prove_one(algorithm: Algorithm, max_size: int, advance: Callable[[], None]) -> ProofResult:
    started = time.perf_counter()
    reports: dict[int, Report] = {}
    error = None
    for size in range(1, max_size + 1):
        try:
            report = prove(algorithm, size)
        except PlanError as wrong:
            error = str(wrong)
            break
        if report:
            reports[size] = report
        advance()
    return ProofResult(algorithm, reports, error, time.perf_counter() - started)


def _table(outcomes: Sequence[ProofResult]) -> Table:
    table = Table()
    names = [f"{outcome.algorithm.collective} {outcome.algorithm.name}" for outcome in outcomes]
    add_names(table, "algorithm", names)
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading in RIGHT else "left")
    for name, outcome in zip(names, outcomes, strict=True):
        verdict = "[red]wrong[/red]" if outcome.error else "[green]proved[/green]"
        table.add_row(name, *_costs(outcome.reports), verdict, f"{outcome.seconds:.1f}")
    return table


def _costs(reports: dict[int, Report]) -> tuple[str, ...]:
    """Return the cells of a row of the table, in the columns from "sizes" to "bits"."""
    if not reports:
        return ("none", *[""] * 6)
    last = reports[max(reports)]
    sent, reduced = (f"{float(value):.4g}·n" for value in (last.sent, last.reduced))
    bits = "same" if last.same_bits else "differ"
    sizes = ranges(reports)
    if len(sizes) > LONGEST:
        sizes = f"{len(reports)} up to {max(reports)}"
    scratch = f"{last.scratch_live} of {last.scratch_blocks}" if last.scratch_blocks else "none"
    return (sizes, str(last.messages), str(last.rounds), sent, reduced, scratch, bits)


def _facts(outcome: ProofResult) -> dict[str, object]:
    return {
        "collective": outcome.algorithm.collective,
        "algorithm": outcome.algorithm.name,
        "error": outcome.error,
        "seconds": outcome.seconds,
        "reports": [
            {
                "size": size,
                "messages": report.messages,
                "rounds": report.rounds,
                "sent": float(report.sent),
                "reduced": float(report.reduced),
                "scratch_blocks": report.scratch_blocks,
                "scratch_live": report.scratch_live,
                "same_bits": report.same_bits,
            }
            for size, report in outcome.reports.items()
        ],
    }
