"""``unisono tune``: which algorithms are fastest on this machine, measured, and the tables that say so."""

from __future__ import annotations

import datetime
import json
import os
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as RichTable

from unisono import __version__, streams
from unisono.bench.sizes import format_size, parse_sizes
from unisono.cli.counts import numbers_of_ranks
from unisono.cli.messages import tell
from unisono.cli.terminal import console, errors_console
from unisono.collectives.communicator import Communicator
from unisono.collectives.environment import detect
from unisono.collectives.init import init
from unisono.collectives.probes import calibrated, rounds_calibrated
from unisono.collectives.trials import Trials
from unisono.errors import AbortedError, CollectiveTimeoutError, NoAlgorithmError, PeerLostError, UsageError
from unisono.launchers.launch import launch
from unisono.options import Options
from unisono.timers import after
from unisono.transports.cores import PLACEMENTS
from unisono.tuning.campaign import Campaign, Settings, patience_s
from unisono.tuning.choice import Known
from unisono.tuning.identity import describe, fingerprint, parameters_of
from unisono.tuning.lint import lint
from unisono.tuning.parameters import Parameters, at_level
from unisono.tuning.store import Measurement, Store, merged
from unisono.tuning.table import Table, compiled, differences, dumped, loaded, to_json

COLLECTIVES = ("allreduce", "reduce_scatter", "allgather", "broadcast", "reduce", "alltoall")
_DTYPES = ("float32", "bfloat16")
# What a campaign takes beside its budget, at most: starting, calibrating, and ending the last race.
_MARGIN_S = 60.0
# What ends a campaign early, and leaves what it has measured.
_ENDINGS = (KeyboardInterrupt, AbortedError, CollectiveTimeoutError, PeerLostError)
# Before a line of rank 0 that tells the parent how far it is.
_PROGRESS = "\x1eunisono-tune "


class Request(NamedTuple):
    """What all ranks are to measure; `store` is the file to which rank 0 appends."""

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    budget_s: float
    dtype: str
    store: str
    placement: str

    @property
    def limit_s(self) -> float:
        """After how long a campaign is given up."""
        waiting_s = 0.0 if self.placement == "any" else patience_s(self.budget_s)
        return 2 * self.budget_s + waiting_s + _MARGIN_S

    @property
    def giving_up(self) -> str:
        """What is told then."""
        more_s = self.limit_s - 2 * self.budget_s
        limit = f"tuning has not ended within {self.limit_s:g} s, twice the budget and {more_s:g} s"
        return f"{limit}: a rank hangs, or calls take very long; what was measured is kept"


def measure(comm: Communicator, request: Request, observe: Any = None) -> int:
    """Go through a campaign, on every rank of `comm`, and return how many sizes the budget has left out."""
    store = Store(Path(request.store))
    before: list[Measurement] = []
    about = {"machine": "", "job": "", "library": __version__, "date": ""}
    if comm.rank == 0:
        before = store.read() if store.path.exists() else []
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        about |= {"machine": fingerprint(), "job": secrets.token_hex(4), "date": now}
    before, about = comm.broadcast_object((before, about))
    settings = Settings(request.collectives, request.sizes, request.budget_s, about, placement=request.placement)
    known = comm.known
    Trials(comm).await_placement(request.placement, patience_s(request.budget_s))
    parameters = _calibrated(comm, known.parameters)
    if parameters is not known.parameters:
        # Good enough to leave candidates out, and not kept: without a table, programs choose better by priors.
        known = Known(None, parameters, about["machine"])

    def keep(measurements: Sequence[Measurement]) -> None:
        if comm.rank == 0:
            store.append(measurements)

    def report(doing: str, part: float) -> None:
        if comm.rank == 0:
            (observe or _tell_parent)(doing, part)

    return Campaign(Trials(comm, request.dtype, known=known), settings, keep, report, before).run()


def _calibrated(comm: Communicator, known: Parameters) -> Parameters:
    """Return what is known, with what is not known yet of the link and the rounds of these ranks."""
    asked = comm.explain("allreduce", 8).question
    link = known.links.get(at_level(asked.link, asked.level))
    if link is None or not link.step.nbytes:
        return calibrated(comm, known, short=True)
    rounds = known.rounds_of(asked.link, asked.size, asked.ranks_per_host)
    if rounds is None or rounds.ranks != asked.size:
        return rounds_calibrated(comm, known, short=True)
    return known


def _tell_parent(doing: str, part: float) -> None:
    print(_PROGRESS + json.dumps([doing, part]), flush=True)


class _Bar:
    """A bar of the budget that is spent, with the time that is left."""

    def __init__(self) -> None:
        shown = errors_console()
        columns = (BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        self.progress = Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal)
        self._task = self.progress.add_task("starting", total=1.0)

    def update(self, doing: str, part: float) -> None:
        """Show how far the campaign is."""
        self.progress.update(self._task, completed=part, description=doing)

    def line(self, rank: int, stream: str, text: str) -> None:
        """Take a line that a rank has written."""
        if text.startswith(_PROGRESS):
            self.update(*json.loads(text.removeprefix(_PROGRESS)))
        else:
            streams.write(sys.stdout if stream == "stdout" else sys.stderr, f"[{rank}] {text}\n")


def _collectives(context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, ...]:
    from unisono.algorithms.registry import algorithms_of

    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    try:
        for name in names:
            algorithms_of(name)
    except NoAlgorithmError as error:
        raise click.BadParameter(str(error)) from None
    if not names:
        raise click.BadParameter("name at least one collective.")
    return names


def _seconds(context: click.Context, parameter: click.Parameter, text: str) -> float:
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    digits = text[:-1] if text[-1:] in units else text
    try:
        value = float(digits) * units.get(text[-1:], 1.0)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise click.BadParameter(f"{text!r} is not a time, as 60s or 5m.")
    return value


@click.group(invoke_without_command=True, short_help="Measure which algorithms are fastest, and make a table of them.")
@click.option("-n", "counts", default="2", show_default=True, callback=numbers_of_ranks, help="Ranks, as 2,3,4.")
@click.option("--collectives", default=",".join(COLLECTIVES), show_default=True, callback=_collectives)
@click.option("--sizes", default="8:4M", show_default=True, help="FIRST:LAST[:FACTOR], or sizes with commas between.")
@click.option("--budget", "budget_s", default="60s", show_default=True, callback=_seconds, help="Time to measure for.")
@click.option("--dtype", type=click.Choice(_DTYPES), default="float32", show_default=True, help="Of the elements.")
@click.option("--transport", type=click.Choice(["auto", "shm", "tcp"]), default="auto", show_default=True)
@click.option("--placement", type=click.Choice(PLACEMENTS), default="any", help="How far apart cores have to be.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default="table.json", show_default=True)
@click.pass_context
def command(
    context: click.Context,
    *,
    counts: tuple[int, ...],
    collectives: tuple[str, ...],
    sizes: str,
    budget_s: float,
    dtype: str,
    transport: str,
    placement: str,
    out: Path,
) -> None:
    """Race algorithms against each other within a budget, and write the table of the fastest to --out.

    What was measured is appended to a file beside it (.jsonl). The same command again goes on from there; with other
    ranks, sizes or collectives it adds to the table. Under torchrun or unisono run it measures over the ranks of that
    job, whatever -n is. Ctrl-C ends it early, with a table of what has been measured; so does what hangs, after twice
    the budget and a minute. Where cores move, as those of virtual machines do, --placement keeps only races during
    which they were near each other, or far from each other, or threads of one core, all the time.

    Use a table by UNISONO_TABLE=table.json, or un.Options(table="table.json").
    """
    if context.invoked_subcommand is not None:
        return
    if out.suffix == ".jsonl":
        raise UsageError("--out is the table; the measurements are beside it in a file .jsonl: choose another suffix")
    request = Request(
        collectives, parse_sizes(sizes), budget_s, dtype, str(out.with_suffix(".jsonl").absolute()), placement
    )
    in_job = detect(os.environ)
    ending: BaseException | None = None
    try:
        if in_job.size > 1:
            _measure_in_job(request)
        else:
            _measure_here(request, counts, transport)
    except _ENDINGS as error:
        ending = error
    if in_job.rank == 0:
        _compile(out)
    if ending is not None:
        raise ending


def _measure_here(request: Request, counts: Sequence[int], transport: str) -> None:
    request = request._replace(budget_s=request.budget_s / len(counts))
    for ranks in counts:
        bar, options = _Bar(), Options(transports=transport)
        try:
            with bar.progress:
                (left, *_) = launch(
                    measure, ranks, request, options=options, on_output=bar.line, timeout_s=request.limit_s
                )
        except CollectiveTimeoutError as error:
            raise CollectiveTimeoutError(f"{request.giving_up} ({error.message})") from None
        _tell_left(left)


def _measure_in_job(request: Request) -> None:
    """Measure over the ranks of the job that this process is one of."""
    bar = _Bar()
    # Any rank may be the one that hangs.
    with init() as world, after(request.limit_s, world.abort, request.giving_up):
        if world.rank > 0:
            measure(world, request)
        else:
            with bar.progress:
                left = measure(world, request, bar.update)
            _tell_left(left)


def _tell_left(left: int) -> None:
    if left:
        tell(f"the budget ended before {left} size(s): the same command again goes on there")


def _compile(out: Path) -> None:
    """Write the table of everything that has been measured, if anything has."""
    store = Store(out.with_suffix(".jsonl"))
    if not store.path.exists():
        return
    table = compiled(store.read())
    _write(out, table)
    console().print(_shown(table))
    tell(f"{out} says which algorithms to use: set UNISONO_TABLE={out}")


def _write(out: Path, table: Table) -> None:
    content = to_json(table, library=__version__, machines={fingerprint(): describe()})
    scratch = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        scratch.write_text(dumped(content), encoding="utf-8")
        scratch.replace(out)
    except OSError as error:
        with suppress(OSError):
            scratch.unlink()
        raise UsageError(f"the table cannot be written to {out}: {error.strerror}") from None


def _shown(table: Table) -> RichTable:
    shown = RichTable(title="Decisions")
    for heading in ("collective", "ranks", "link", "dtype", "from", "algorithm", "µs there"):
        shown.add_column(heading, justify="right" if heading in ("ranks", "from", "µs there") else "left")
    for context, decision in table.decisions.items():
        for each in decision.ranges:
            seconds = decision.times_at(max(each.first, decision.sizes[0])).get(each.variant)
            time = "" if seconds is None else f"{seconds * 1e6:.1f}"
            where = (context.collective, str(context.ranks), context.link, context.dtype)
            shown.add_row(*where, format_size(each.first), each.variant, time)
    return shown


_TABLE = click.Path(exists=True, dir_okay=False, path_type=Path)


@command.command("show")
@click.argument("path", type=_TABLE, metavar="TABLE")
def show(path: Path) -> None:
    """Show the decisions of a table."""
    console().print(_shown(loaded(path)))


@command.command("merge")
@click.argument("paths", type=_TABLE, nargs=-1, required=True, metavar="TABLE...")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The table to write.")
def merge(paths: tuple[Path, ...], out: Path) -> None:
    """Put the measurements of several tables together, and make one table of them.

    A table's measurements are beside it, in a file of its name with .jsonl; such a file may be given as well.
    """
    stores = [Store(path.with_suffix(".jsonl")) for path in paths]
    together = list(merged(store.read() for store in stores))
    target = Store(out.with_suffix(".jsonl"))
    old = set(target.read()) if target.path.exists() else set()
    target.append([each for each in together if each not in old])
    _write(out, compiled(target.read()))


@command.command("diff")
@click.argument("first", type=_TABLE)
@click.argument("second", type=_TABLE)
def diff(first: Path, second: Path) -> int:
    """Show where two tables decide otherwise. The exit code is 1 if they do somewhere."""
    found = differences(loaded(first), loaded(second))
    for line in found:
        click.echo(line)
    return 1 if found else 0


@command.command("lint")
@click.argument("path", type=_TABLE, metavar="TABLE")
def lint_(path: Path) -> int:
    """Tell what in a table cannot be right, as an allreduce slower than a reduce and a broadcast. Exit code 1 if so."""
    found = lint(loaded(path))
    for line in found:
        click.echo(line)
    return 1 if found else 0


@command.command("report")
@click.argument("path", type=_TABLE, metavar="TABLE")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="The folder to write to.")
def report_(path: Path, out: Path) -> None:
    """Draw a table and its measurements: PNG pictures, and one page of HTML that needs no network."""
    from unisono.tuning.report import write

    store = Store(path.with_suffix(".jsonl"))
    measurements = store.read() if store.path.exists() else []
    page = write(loaded(path), measurements, out, parameters_of(fingerprint()))
    click.echo(str(page))
