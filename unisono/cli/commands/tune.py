"""``unisono tune``: measures which algorithms are fastest on this machine, and writes decision tables."""

from __future__ import annotations

import datetime
import json
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import click
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from unisono import __version__
from unisono.bench.sizes import format_size, parse_sizes
from unisono.cli.machine.load import MOST_OFF, Load, load_now
from unisono.cli.messages import tell
from unisono.cli.options.counts import numbers_of_ranks
from unisono.cli.options.loading import load_option, loaded_files
from unisono.cli.options.outputs import OutputFile
from unisono.cli.output.tables import COMMANDS, shown_table
from unisono.cli.output.terminal import console, errors_console
from unisono.collectives.bootstrap.environment import detect
from unisono.collectives.bootstrap.init import init
from unisono.collectives.communicator import Communicator
from unisono.collectives.measurement.call_trials import CallTrials
from unisono.collectives.measurement.link_probes import calibrated, rounds_calibrated
from unisono.errors import AbortedError, CollectiveTimeoutError, NoAlgorithmError, PeerLostError, UsageError
from unisono.foundation import streams
from unisono.foundation.watchdog import call_if_overdue
from unisono.launchers.launch import launch
from unisono.options import Options
from unisono.transports.host.core_distance import PLACEMENTS
from unisono.tuning.decide.choice import TunerState
from unisono.tuning.decide.lint import lint
from unisono.tuning.decide.table import compiled
from unisono.tuning.machine.fingerprint import fingerprint
from unisono.tuning.machine.parameters import Parameters, at_level
from unisono.tuning.measure.campaign import Campaign, Settings, is_unmeasured, patience_s
from unisono.tuning.measure.measurement_log import Context, Measurement, MeasurementStore, identity
from unisono.tuning.measure.table_files import compile_table, log_of

# Points of a table: contexts and bytes of the vector.
Again: TypeAlias = "frozenset[tuple[Context, int]]"

# The choices of `--again`: which earlier measurements it replaces.
AGAIN = ("suspicious", "all")
_MOST_ITEMSIZE = 4  # the largest itemsize of the measured dtypes
COLLECTIVES = ("allreduce", "reduce_scatter", "allgather", "broadcast", "reduce", "alltoall")
_DTYPES = ("float32", "bfloat16")
# The time that a campaign takes at most besides its budget: for starting, calibrating, and ending the last race.
_MARGIN_S = 60.0
# A campaign that ends early by one of these keeps its measurements.
_ENDINGS = (KeyboardInterrupt, AbortedError, CollectiveTimeoutError, PeerLostError)
# Rank 0 begins lines with this if they report progress to the parent process.
_PROGRESS = "\x1eunisono-tune "


class TuneRequest(NamedTuple):
    """The request for measurements, which all ranks get.

    Attributes:
        collectives, sizes, budget_s, dtype, placement: as in `Settings` of a campaign.
        store: the file to which rank 0 appends.
        load: the load average of the machine before the campaign.
        again: points whose earlier measurements do not count.
    """

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    budget_s: float
    dtype: str
    store: str
    placement: str
    load: float
    again: Again = frozenset()

    @property
    def limit_s(self) -> float:
        """The time after which a campaign is aborted."""
        waiting_s = 0.0 if self.placement == "any" else patience_s(self.budget_s)
        return 2 * self.budget_s + waiting_s + _MARGIN_S

    @property
    def giving_up(self) -> str:
        """The error message of an aborted campaign."""
        more_s = self.limit_s - 2 * self.budget_s
        limit = f"tuning has not ended within {self.limit_s:g} s (twice the budget and {more_s:g} s)"
        return f"{limit}: a rank hangs, or calls take very long; measurements up to now are kept"


def measure(comm: Communicator, request: TuneRequest, observe: Any = None) -> list[tuple[str, int]]:
    """Run a campaign on every rank of `comm`; return the collectives and bytes that the budget did not allow."""
    store = MeasurementStore(Path(request.store))
    before: list[Measurement] = []
    about: dict[str, Any] = {"machine": "", "job": "", "library": __version__, "date": "", "load": request.load}
    if comm.rank == 0:
        before = store.read() if store.path.exists() else []
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        about |= {"machine": fingerprint(), "job": secrets.token_hex(4), "date": now}
    before, about, again = comm.broadcast_object((before, about, request.again))
    settings = Settings(
        request.collectives, request.sizes, request.budget_s, about, placement=request.placement, again=again
    )
    state = comm.tuner_state
    CallTrials(comm).await_placement(request.placement, patience_s(request.budget_s))
    parameters = _calibrated(comm, state.parameters)
    if parameters is not state.parameters:
        # Good enough to drop candidates, but not kept, because programs without a table choose better by priors.
        state = TunerState(None, parameters, about["machine"])

    def keep(measurements: Sequence[Measurement]) -> None:
        if comm.rank == 0:
            store.append(measurements)

    def report(progress: str, part: float) -> None:
        if comm.rank == 0:
            (observe or _tell_parent)(progress, part)

    return Campaign(CallTrials(comm, request.dtype, tuner_state=state), settings, keep, report, before).run()


def _calibrated(comm: Communicator, parameters: Parameters) -> Parameters:
    """Return the parameters of the model.

    The parameters of the link and of rounds among these ranks are measured if they are missing.
    """
    question = comm.explain("allreduce", 8).question
    link = parameters.links.get(at_level(question.link, question.level))
    if link is None or not link.step.nbytes:
        return calibrated(comm, parameters, short=True)
    rounds = parameters.rounds_of(question.link, question.size, question.ranks_per_host)
    if rounds is None or rounds.ranks != question.size:
        return rounds_calibrated(comm, parameters, short=True)
    return parameters


def _tell_parent(progress: str, part: float) -> None:
    print(_PROGRESS + json.dumps([progress, part]), flush=True)


class _BudgetBar:
    """A progress bar of the spent budget, with the remaining time."""

    def __init__(self) -> None:
        shown = errors_console()
        columns = (BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        self.progress = Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal)
        self._task = self.progress.add_task("starting", total=1.0)

    def update(self, description: str, part: float) -> None:
        """Show the spent part of the budget and the current race."""
        self.progress.update(self._task, completed=part, description=description)

    def line(self, rank: int, stream: str, text: str) -> None:
        """Show the progress that a line of a rank reports, or write the line."""
        if text.startswith(_PROGRESS):
            self.update(*json.loads(text.removeprefix(_PROGRESS)))
        else:
            streams.write(sys.stdout if stream == "stdout" else sys.stderr, f"[{rank}] {text}\n")


def _collectives(context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, ...]:
    from unisono.algorithms.catalogue.registry import algorithms_of

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
        raise click.BadParameter(f"{text!r} is not a time such as 60s or 5m.")
    return value


@click.group(
    invoke_without_command=True, short_help="Measure which algorithms are fastest, and write a decision table."
)
@click.option("-n", "counts", default="2", show_default=True, callback=numbers_of_ranks, help="Ranks, such as 2,3,4.")
@click.option("--collectives", default=",".join(COLLECTIVES), show_default=True, callback=_collectives)
@click.option("--sizes", default="8:4M", show_default=True, help="FIRST:LAST[:FACTOR], or sizes with commas between.")
@click.option("--budget", "budget_s", default="60s", show_default=True, callback=_seconds, help="Time to measure.")
@click.option("--dtype", type=click.Choice(_DTYPES), default="float32", show_default=True, help="Of the elements.")
@click.option("--transports", "transport", type=click.Choice(["auto", "shm", "tcp"]), default="auto", show_default=True)
@click.option("--placement", type=click.Choice(PLACEMENTS), default="any", help="Keep only times with this placement.")
@click.option("--again", type=click.Choice(AGAIN), help="Replace suspicious earlier measurements, or all.")
@click.option("--force", is_flag=True, help="Write the table even if some times in it cannot be right.")
@click.option("--out", type=OutputFile(), default="table.json", show_default=True)
@load_option
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
    again: str | None,
    force: bool,
    out: Path,
) -> int:
    """Measure algorithms in turns within a budget, and write a table of the fastest to --out.

    Measurements are appended to a file next to the table (.jsonl). The same command continues later. With other ranks,
    sizes or collectives, it adds to the table. Under torchrun or unisono run, it measures over the ranks of that job,
    and -n has no effect. Ctrl-C ends it early, with a table of the measurements up to then. So does a hang, after twice
    the budget and a minute. On virtual machines, where the hypervisor moves cores, --placement keeps only measurements
    during which the cores were two threads of one core, near, or far all the time.

    At the end, implausible times in the table are listed. --again suspicious measures these again, --again all
    measures all points of the command again. New times replace the old ones.

    To use a table: UNISONO_TABLE=table.json, or un.Options(table="table.json").
    """
    if context.invoked_subcommand is not None:
        return 0
    if out.suffix == ".jsonl":
        raise UsageError("--out cannot end in .jsonl, because that file is for the measurements: use another suffix")
    in_job, load, store = detect(os.environ), load_now(), MeasurementStore(log_of(out))
    before = store.read() if in_job.rank == 0 and store.path.exists() else []
    request = TuneRequest(
        collectives, parse_sizes(sizes), budget_s, dtype, str(store.path.absolute()), placement, load.average
    )
    if again:
        ranks = (in_job.size,) if in_job.size > 1 else counts
        request = request._replace(again=_points_again(again, before, request, ranks))
    if in_job.rank == 0:
        load.warn_if_busy()
    ending: BaseException | None = None
    status = 0
    try:
        if in_job.size > 1:
            _measure_in_job(request)
        else:
            _measure_here(request, counts, transport)
    except _ENDINGS as error:
        ending = error
    if in_job.rank == 0 and store.path.exists():
        _replace_old(store, before, request.again)
        status = _report(out, store.read(), force, load)
    if ending is not None:
        raise ending
    return status


def _points_again(mode: str, before: Sequence[Measurement], request: TuneRequest, ranks: Sequence[int]) -> Again:
    """Return the requested points whose earlier measurements are suspicious, or all of them in mode "all"."""
    if mode == "all":
        points = {(each.context, each.nbytes) for each in before}
    else:
        points = {point for suspicion in lint(compiled(before)) for point in suspicion.points} if before else set()
    return frozenset(point for point in points if _is_asked(*point, request, ranks))


def _is_asked(context: Context, nbytes: int, request: TuneRequest, ranks: Sequence[int]) -> bool:
    """Return whether a request covers a point; sizes are rounded up to whole elements for each rank."""
    rounded = max(request.sizes) + context.ranks * _MOST_ITEMSIZE
    has_size = context.collective == "barrier" or min(request.sizes) <= nbytes <= rounded
    return context.collective in request.collectives and context.ranks in ranks and has_size


def _replace_old(store: MeasurementStore, before: Sequence[Measurement], again: Again) -> None:
    """Remove the earlier measurements of points that have been measured again."""
    old = {identity(each) for each in before}
    new = {(each.context, each.nbytes) for each in store.read() if identity(each) not in old}
    if stale := [each for each in before if (each.context, each.nbytes) in new & again]:
        store.remove(stale)


def _measure_here(request: TuneRequest, counts: Sequence[int], transport: str) -> None:
    _tell_unmeasured(request.collectives)
    request = request._replace(budget_s=request.budget_s / len(counts))
    for ranks in counts:
        bar, options = _BudgetBar(), Options(transports=transport, load=loaded_files())
        try:
            with bar.progress:
                (missing, *_) = launch(
                    measure, ranks, request, options=options, on_output=bar.line, timeout_s=request.limit_s
                )
        except CollectiveTimeoutError as error:
            raise CollectiveTimeoutError(f"{request.giving_up} ({error.message})") from None
        _tell_missing(ranks, missing)


def _measure_in_job(request: TuneRequest) -> None:
    """Measure over the ranks of the job of this process."""
    bar = _BudgetBar()
    # Every rank has a watchdog, because any rank may be the one that hangs.
    with init() as world, call_if_overdue(request.limit_s, world.abort, request.giving_up):
        if world.rank > 0:
            measure(world, request)
        else:
            if len(world.hosts) == 1:
                _tell_unmeasured(request.collectives)
            with bar.progress:
                missing = measure(world, request, bar.update)
            _tell_missing(world.size, missing)


def _tell_unmeasured(collectives: Sequence[str]) -> None:
    """Report the algorithms that are not measured, because all ranks are on one host."""
    from unisono.algorithms.catalogue.registry import candidates_of

    algorithms = [each for name in collectives for each in candidates_of(name).values()]
    names = dict.fromkeys(each.name for each in algorithms if is_unmeasured(each, is_one_host=True))
    if names:
        reason = "their only gain are short ways in a network, and all ranks are on one host"
        tell(f"not measured, because {reason}: {', '.join(names)}")


def _tell_missing(ranks: int, missing: Sequence[tuple[str, int]]) -> None:
    """Report the collectives and sizes that the budget did not allow."""
    if not missing:
        return
    sizes = {name: [format_size(nbytes) for each, nbytes in missing if each == name] for name, _ in missing}
    listed = "; ".join(f"{name} of {', '.join(of_name)}" for name, of_name in sizes.items())
    report = f"the budget ended before these were measured among {ranks} ranks: {listed}"
    tell(f"{report}. Run the same command again to continue")


def _report(out: Path, measurements: Sequence[Measurement], force: bool, load: Load) -> int:
    """Write and show the table of the measurements with its suspicious times; return the exit code.

    A table is refused if a guideline is broken by a factor beyond `MOST_OFF`, because it would mislead all later jobs.
    """
    table = compiled(measurements)
    suspicions = lint(table)
    is_refused = not force and any(each.factor > MOST_OFF for each in suspicions)
    console().print(shown_table(table if is_refused else compile_table(out, measurements, __version__)))
    for suspicion in suspicions:
        tell(f"suspicious: {suspicion.text}")
    if any(each.points for each in suspicions):
        tell("the same command with --again suspicious measures them again, best on a quiet machine")
    if is_refused:
        tell(f"{out} is not written, because such times cannot be right ({load}); --force writes it all the same")
        return 1
    tell(f"{out} now decides which algorithms are fastest: to use it, set UNISONO_TABLE={out}")
    return 0


for _subcommand in COMMANDS:
    command.add_command(_subcommand)
