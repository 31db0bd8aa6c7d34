"""``unisono test``: random calls of every collective on local ranks, checked against numpy."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import click
from rich.table import Table

from unisono.cli.messages import tell
from unisono.cli.output.terminal import console, progress
from unisono.options import Options
from unisono.testing import Case, CheckError, Summary
from unisono.testing.cases import random_case
from unisono.testing.check import SEEDS, CaseVerdict, judged
from unisono.testing.judges import BRIEF_S, Judges, RanksFailure, while_searching
from unisono.testing.shrinking import shrunk
from unisono.testing.sources import TIMEOUT_S, SourceBackend, source


def _backend(ctx: click.Context, param: click.Parameter, value: str | None) -> SourceBackend | None:
    """Return the backend that `value` names, without importing it here: the ranks import it."""
    if value is None:
        return None
    module, _, function = value.partition(":")
    if not module or not function.isidentifier():
        raise click.BadParameter(f"{value!r} is not MODULE:FUNCTION", ctx, param)
    return SourceBackend(module, function)


@dataclasses.dataclass(frozen=True)
class _Wrong:
    """A case with a wrong result.

    Attributes:
        message: the number of the case, its fault, and the program.
        program: a program that repeats the simplest call with a wrong result.
    """

    message: str
    program: str


def _finite(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} must be a finite number of seconds.")
    return value


@click.command(short_help="Run random calls of every collective, and check their results.")
@click.option("-n", "ranks", type=click.IntRange(min=1), default=2, show_default=True, help="Number of ranks.")
@click.option("--cases", type=click.IntRange(min=1), default=1000, show_default=True, help="Number of calls.")
@click.option("--seed", type=click.IntRange(0, SEEDS - 1), help="Seed of the calls.  [default: a new one each time]")
@click.option("--transports", default="shm", show_default=True, help="In order of preference, with commas between.")
@click.option(
    *("--backend", "backend"),
    callback=_backend,
    metavar="MODULE:FUNCTION",
    help="Check the communicator that FUNCTION(communicator) returns on each rank, instead of Unisono's.",
)
@click.option(
    *("--timeout", "timeout_s"),
    type=click.FloatRange(min=0, min_open=True),
    callback=_finite,
    default=TIMEOUT_S,
    show_default=True,
    help="Seconds after which a call counts as hanging.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
def command(
    *,
    ranks: int,
    cases: int,
    seed: int | None,
    transports: str,
    backend: SourceBackend | None,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Run random calls of every collective on local ranks, and check their results with numpy.

    The same --seed and -n run the same calls again. The command ends at the first call that is wrong or hangs, and
    prints a program that repeats the simplest such call. The exit code is 1 then.
    """
    seed = random.SystemRandom().randrange(SEEDS) if seed is None else seed
    began = time.monotonic()
    with Judges(Options(transports=transports), backend, timeout_s) as judges:
        summary, wrong = _run(judges, ranks, cases, seed, partial(source, backend=backend, timeout_s=timeout_s))
    if as_json:
        facts = {"ranks": ranks, "transports": transports, **dataclasses.asdict(summary)}
        error = None if wrong is None else dataclasses.asdict(wrong)
        click.echo(json.dumps({**facts, "seconds": time.monotonic() - began, "error": error}, indent=2))
    else:
        console().print(_table(summary))
        print(f"seed {seed}, {ranks} rank(s), {transports}")
    if wrong is not None:
        tell(wrong.message)
    return 0 if wrong is None else 1


def _run(
    judges: Judges, ranks: int, cases: int, seed: int, source_of: Callable[..., str]
) -> tuple[Summary, _Wrong | None]:
    """Return the summary of the cases up to the first wrong one, and the wrong one if there is any."""
    tried: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    wrong = None
    with progress() as bar:
        for number in bar.track(range(cases), description=""):
            case = random_case(seed, number, ranks)
            text, is_refused = _verdict(judges, case, ranks)
            if text:
                wrong = _explained(judges, case, ranks, f"case {number} of seed {seed}: {text}", source_of)
                break
            tried[case.collective] += 1
            refused[case.collective] += is_refused
    return Summary(seed, dict(sorted(tried.items())), dict(sorted(refused.items()))), wrong


def _verdict(judges: Judges, case: Case, ranks: int, most_s: float = math.inf) -> tuple[str, bool]:
    """Return the fault of a case (empty if there is none), and whether the call was refused."""
    outcome = judges.run(_judge, case, ranks, most_s)
    return (str(outcome), False) if isinstance(outcome, RanksFailure) else (outcome[0].wrong, outcome[0].is_refused)


def _judge(comm: object, case: Case) -> CaseVerdict:
    """Judge a case on a rank; fail if the ranks could not agree, because the communicator has then failed too."""
    verdict = dataclasses.replace(judged(comm, case), cause=None)
    if not verdict.is_agreed:
        raise CheckError(verdict.wrong)
    return verdict


def _explained(judges: Judges, case: Case, ranks: int, text: str, source_of: Callable[..., str]) -> _Wrong:
    """Search the simplest case that is also wrong when it is the first call of freshly started ranks."""
    judges.close()
    if not _verdict(judges, case, ranks)[0]:
        text += "\nOn its own this case is right: it depends on earlier cases, which the same --seed runs again."
    is_wrong = while_searching(lambda case, ranks: bool(_verdict(judges, case, ranks, BRIEF_S)[0]))
    simplest, fewest = shrunk(case, ranks, is_wrong, {1, 2, 3, ranks // 2, ranks - 1} - {0})
    if judges.timeout_s > BRIEF_S and not _verdict(judges, simplest, fewest)[0]:  # the simpler case was only slow
        simplest, fewest = case, ranks
    program = source_of("check_case", simplest, fewest)
    return _Wrong(f"{text}\n\n{program}", program)


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
