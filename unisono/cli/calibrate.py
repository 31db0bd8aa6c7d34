"""``unisono calibrate``: what links and memory of this machine cost, for the model to choose by."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import click
from rich.table import Table

from unisono import __version__
from unisono.algorithms.catalogue.variants import Variant
from unisono.bench.sizes import format_size
from unisono.cli.counts import numbers_of_ranks
from unisono.cli.load import Load, load_now
from unisono.cli.loading import load_option, loaded_files
from unisono.cli.messages import tell
from unisono.cli.terminal import console
from unisono.collectives.bootstrap.environment import detect
from unisono.collectives.bootstrap.init import init
from unisono.collectives.communicator import Communicator
from unisono.collectives.measurement.call_trials import Trials
from unisono.collectives.measurement.link_probes import calibrated, rounds_calibrated
from unisono.errors import CollectiveTimeoutError, UsageError
from unisono.launchers.launch import launch
from unisono.options import Options
from unisono.tuning.decide.choice import TunerState, candidate
from unisono.tuning.machine.fingerprint import describe, fingerprint
from unisono.tuning.machine.parameters import UNBOUNDED, Parameters, to_json
from unisono.tuning.measure import calibration_files
from unisono.tuning.measure.calibration_files import Calibration, Origin
from unisono.tuning.measure.race import typical_s
from unisono.watchdog import call_if_overdue

# Whole collectives by which the model is checked, a ring and a butterfly, and their bytes.
_CHECKS = (("allgather", "ring"), ("allreduce", "recursive_doubling"))
_CHECKED = (64, 16 << 10, 1 << 20)
# A model that is off by more than this factor in a check was measured while something else used the cores or the link.
# On machines at rest, short calibrations were off by up to 2.5.
MOST_OFF = 4.0
# After how long what is measured over one transport, by one number of ranks, is given up; usual are seconds.
_LIMITS_S = {"short": 60.0, "long": 300.0}


class Check(NamedTuple):
    """What the model predicts of a collective, and what it took."""

    collective: str
    algorithm: str
    nbytes: int
    predicted_s: float
    measured_s: float

    @property
    def factor(self) -> float:
        """By which factor the prediction is off, in either direction; at least 1."""
        return max(self.predicted_s / self.measured_s, self.measured_s / self.predicted_s)

    def __str__(self) -> str:
        times = f"{self.predicted_s * 1e6:.1f} µs are predicted, and it took {self.measured_s * 1e6:.1f}"
        return f"{self.collective} {self.algorithm} of {format_size(self.nbytes)}: {times}"


class Step(NamedTuple):
    """One step of a calibration: so many ranks over a link, and the parameters that are known after it."""

    link: str
    ranks: int
    parameters: Parameters
    checks: tuple[Check, ...]

    @property
    def worst(self) -> Check | None:
        """The check in which the model is off most; None if there are no checks."""
        return max(self.checks, key=lambda check: check.factor, default=None)

    @property
    def is_credible(self) -> bool:
        """Whether the model that was measured predicts the checks about right."""
        return self.worst is None or self.worst.factor <= MOST_OFF


def measure(comm: Communicator, known: Parameters, short: bool) -> tuple[Parameters, list[Check]]:
    """Calibrate, on every rank of `comm`, and check the model."""
    parameters = calibrated(comm, known, short=short)
    return parameters, _check(comm, parameters)


def measure_rounds(comm: Communicator, known: Parameters, short: bool) -> tuple[Parameters, list[Check]]:
    """Calibrate what rounds among all ranks of `comm` cost, and check the model."""
    parameters = rounds_calibrated(comm, known, short=short)
    return parameters, _check(comm, parameters)


def _check(comm: Communicator, parameters: Parameters) -> list[Check]:
    """Run some collectives, on every rank of `comm`, and return what the model predicts of them and what they took."""
    trials = Trials(comm, tuner_state=TunerState(None, parameters))
    checks = list[Check]()
    for collective, name in _CHECKS:
        for nbytes in (trials.nbytes(collective, nbytes) for nbytes in _CHECKED):
            asked = trials.question(collective, nbytes)
            predicted_s = candidate(Variant(name), asked, trials.known, None, is_named=True).predicted_s
            if predicted_s is not None and trials.prepare(collective, nbytes, name) is None:
                times, _ = trials.run(collective, nbytes, name)
                checks.append(Check(collective, name, nbytes, predicted_s, typical_s(times)))
    return checks


def _measure_in_job(known: Parameters, short: bool) -> Step:
    """Measure over the ranks of the job that this process is one of; rank 0's parameters count."""
    limit_s = _LIMITS_S["short" if short else "long"]
    giving_up = f"the ranks have not been measured within {limit_s:g} s: one hangs, or their link is very slow"
    # Any rank may be the one that hangs.
    with init() as world, call_if_overdue(limit_s, world.abort, giving_up):
        link = world.explain("allreduce", _CHECKED[0]).question.link
        parameters, checks = measure(world, known, short)
        return Step(link, world.size, parameters, tuple(checks))


def _measure_here(known: Parameters, transport: str, ranks: int, short: bool) -> Step:
    """Measure so many local ranks over a transport.

    Raises:
        CollectiveTimeoutError: they have not ended in time.
    """
    limit_s, options = _LIMITS_S["short" if short else "long"], Options(transports=transport, load=loaded_files())
    try:
        if ranks > 2:
            results = launch(measure_rounds, ranks, known, short, options=options, timeout_s=limit_s)
        else:
            results = launch(measure, ranks, known, short, bind="core", options=options, timeout_s=limit_s)
    except CollectiveTimeoutError as error:
        what = f"{ranks} ranks by {transport} have not been measured within {limit_s:g} s"
        advice = "a rank hangs, or the link is very slow; what was measured before is kept"
        raise CollectiveTimeoutError(f"{what}: {advice} ({error.message})") from None
    parameters, checks = results[0]
    return Step(transport, ranks, parameters, tuple(checks))


class _Run:
    """The steps of one calibration, and what is kept of it."""

    def __init__(self, machine: str, force: bool) -> None:
        self.load = load_now()
        self.steps: list[Step] = []
        self._machine = machine
        self._force = force
        self.before = calibration_files.parameters_of(machine)
        self.parameters = self.before

    def add(self, step: Step) -> bool:
        """Take a step into the parameters if it is credible, or forced; return whether it was."""
        self.steps.append(step)
        is_taken = self._force or step.is_credible
        if is_taken:
            self.parameters = step.parameters
        return is_taken

    @property
    def refused(self) -> list[Step]:
        """The steps that are not kept."""
        return [] if self._force else [step for step in self.steps if not step.is_credible]

    def keep(self) -> str | None:
        """Write the parameters to the cache; return the path, or None if there is nothing new or no way to write."""
        if self.parameters == self.before:
            return None
        known = _known_calibration(self._machine)
        path = calibration_files.path_of(self._machine)
        origins = {**(known.origins if known else {}), **self._origins()}
        calibration = Calibration(self._machine, path, self.parameters, describe(), origins)
        return path if calibration_files.keep(calibration) else None

    def _origins(self) -> dict[str, Origin]:
        """Return how the links that have changed came about."""
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes")
        taken = [step for step in self.steps if step not in self.refused]
        origins = dict[str, Origin]()
        for name in self._changed():
            factors = [step.worst.factor for step in taken if step.worst and step.link == name]
            worst_factor = max(factors, default=1.0)
            origins[name] = Origin(now, __version__, self.load.average, self.load.cores, worst_factor)
        return origins

    def _changed(self) -> list[str]:
        """Return the names of the links of which something has been measured now."""
        old, new = self.before, self.parameters
        names = (*new.links, *new.rounds)
        return [
            name
            for name in dict.fromkeys(names)
            if old.links.get(name) != new.links.get(name) or old.rounds.get(name) != new.rounds.get(name)
        ]


def _known_calibration(machine: str) -> Calibration | None:
    """Return the calibration in the cache; None if there is none, or none that can be read."""
    try:
        return calibration_files.read(machine)
    except (OSError, ValueError):
        return None


@click.group(invoke_without_command=True, short_help="Measure the links and the memory of this machine.")
@click.option("-n", "counts", default="2", show_default=True, callback=numbers_of_ranks, help="Ranks, as 2,4,8.")
@click.option("--transport", type=click.Choice(["shm", "tcp", "all"]), default="all", show_default=True)
@click.option("--short", is_flag=True, help="Take a second or two for each transport, and fewer sizes.")
@click.option("--force", is_flag=True, help="Keep also what its own check shows to be wrong.")
@click.option("--json", "as_json", is_flag=True, help="Print the parameters as JSON.")
@load_option
@click.pass_context
def command(
    context: click.Context, *, counts: tuple[int, ...], transport: str, short: bool, force: bool, as_json: bool
) -> int:
    """Measure what messages, reductions and copies take, and keep it in the user's cache folder.

    Messages and memory are measured between two ranks that have a core each, and rounds of collectives among as many
    ranks as -n says, as they share the cores. Then a few collectives are predicted and measured. If the model is off
    by a factor of more than 4 in one of them, the machine was busy: what was measured so is not kept, and the exit
    code is 1.

    Under torchrun, mpirun, srun or unisono run it measures the links and the rounds of the ranks of that job, whatever
    -n and --transport are: between hosts, too, and there how many pairs of ranks have the full bandwidth at once.

    What has not been measured over a transport, by a number of ranks, within five minutes (one with --short) is given
    up, and what was measured before is kept.

    From then on, every job whose rank 0 is on such a machine chooses algorithms by it, where no table says better.
    """
    if context.invoked_subcommand is not None:
        return 0
    run = _Run(fingerprint(), force)
    in_job = detect(os.environ)
    if in_job.size > 1:
        run.add(_measure_in_job(run.before, short))
        return _report(run, run.keep(), as_json) if in_job.rank == 0 else 0
    run.load.warn_if_busy()
    path: str | None = None
    try:
        for name in ("shm", "tcp") if transport == "all" else (transport,):
            for ranks in (2, *(each for each in counts if each > 2)):
                if not run.add(_measure_here(run.parameters, name, ranks, short)):
                    break
    finally:
        path = run.keep()
    return _report(run, path, as_json)


def _report(run: _Run, path: str | None, as_json: bool) -> int:
    """Print what was measured, what is not kept and why, and where the rest is kept; return the exit code."""
    if as_json:
        click.echo(json.dumps(to_json(run.parameters), indent=2))
    else:
        shown = console()
        shown.print(_links(run.parameters))
        shown.print(_memory(run.parameters))
        shown.print(_checked(run.steps))
        shown.print(f"measured at {run.load}", highlight=False)
        if path is not None:
            shown.print(f"kept in {path}", highlight=False)
    for step in run.refused:
        tell(_refusal(step, run.load))
    return 1 if run.refused else 0


def _refusal(step: Step, load: Load) -> str:
    assert step.worst is not None, "a step without checks is credible"
    off = f"its model is off by a factor of {step.worst.factor:.0f} in {step.worst}"
    advice = f"the machine was busy ({load}); calibrate it when it is quiet, or keep this by --force"
    return f"the calibration of {step.ranks} ranks by {step.link} is not kept: {off}: {advice}"


@command.command("show")
def show() -> None:
    """List the calibrations in the cache folder: of which machines and links, from when, and how good they are."""
    usable, unusable = calibration_files.read_all()
    shown, here = console(), fingerprint()
    for calibration in usable:
        shown.print(_shown(calibration, is_here=calibration.machine == here))
    for path, reason in unusable.items():
        tell(f"{path} is not used: {reason}")
    if here not in {calibration.machine for calibration in usable}:
        shown.print(f"no calibration of this machine ({here}): `unisono calibrate` measures it", highlight=False)


def _shown(calibration: Calibration, *, is_here: bool) -> Table:
    identity = calibration.identity
    words = f"{identity.get('processor', 'unknown processor')}, {identity.get('cores', '?')} cores"
    title = f"{calibration.machine}{' (this machine)' if is_here else ''}: {words}\n{calibration.path}"
    table = Table(title=title, title_justify="left")
    for heading in ("link", "ranks", "measured", "load", "model off by up to", "Unisono"):
        table.add_column(heading, overflow="fold")
    parameters = calibration.parameters
    measured = [name for name, link in parameters.links.items() if link.step.nbytes]
    for name in dict.fromkeys((*measured, *parameters.rounds)):
        origin = calibration.origins.get(name, Origin())
        ranks = ", ".join(str(rounds.ranks) for rounds in parameters.rounds.get(name, ()))
        load = f"{origin.load:.1f} on {origin.cores} cores" if origin.cores else "unknown"
        table.add_row(name, ranks, origin.date, load, f"{origin.worst_factor:.1f}×", origin.library)
    return table


@command.command("forget")
@click.argument("machines", nargs=-1, metavar="[MACHINE...]")
@click.option("--all", "everything", is_flag=True, help="Remove the calibrations of all machines.")
def forget(machines: tuple[str, ...], everything: bool) -> None:
    """Remove the calibrations of the machines with these fingerprints, by default of this machine.

    Later jobs choose algorithms by priors there, until the machine is calibrated again.
    """
    if everything and machines:
        raise UsageError("--all removes all calibrations: leave the fingerprints out")
    usable, unusable = calibration_files.read_all()
    names = {calibration_files.path_of(calibration.machine): calibration.machine for calibration in usable}
    names |= {path: os.path.basename(path).removesuffix(".json") for path in unusable}
    for machine in names.values() if everything else machines or (fingerprint(),):
        if machine not in names.values():
            raise UsageError(f"there is no calibration of {machine!r}; {_those(names)}")
        calibration_files.forget(machine)
        click.echo(f"removed {calibration_files.path_of(machine)}")


def _those(names: Mapping[str, str]) -> str:
    return f"there are those of {', '.join(names.values())}" if names else "there are none"


def _links(parameters: Parameters) -> Table:
    table = Table(title="Links")
    for heading in ("link", "latency µs", "overhead µs", "GB/s", "pairs at once", "measured"):
        table.add_column(heading, justify="left" if heading in ("link", "measured") else "right")
    for name, link in parameters.links.items():
        rate = f"{1e-9 / link.per_byte_s:.2f}" if link.per_byte_s else ""
        knots = link.step.nbytes
        measured = f"{len(knots)} sizes, to {format_size(knots[-1])}" if knots else "no: a prior"
        pairs = "" if link.pairs == UNBOUNDED else f"{link.pairs:.1f}"
        table.add_row(name, f"{link.latency_s * 1e6:.2f}", f"{link.overhead_s * 1e6:.2f}", rate, pairs, measured)
    return table


def _checked(steps: Sequence[Step]) -> Table:
    table = Table(title="The model, checked by a ring and a butterfly")
    for heading in ("link", "ranks", "call", "bytes", "predicted µs", "measured µs", "error"):
        table.add_column(heading, justify="left" if heading in ("link", "call") else "right")
    for step in steps:
        for each in step.checks:
            times = f"{each.predicted_s * 1e6:.1f}", f"{each.measured_s * 1e6:.1f}"
            error = f"{each.predicted_s / each.measured_s - 1:+.0%}"
            style = "red" if each.factor > MOST_OFF else None
            call = f"{each.collective} {each.algorithm}"
            table.add_row(step.link, str(step.ranks), call, format_size(each.nbytes), *times, error, style=style)
    return table


def _memory(parameters: Parameters) -> Table:
    curves = {f"reduce {dtype}": found for dtype, found in parameters.reduce.items()} | {"copy": parameters.copy}
    sizes = next((found.nbytes for found in curves.values() if found.nbytes), ())
    table = Table(title="Memory, GB/s")
    for heading in ("work", *map(format_size, sizes)):
        table.add_column(heading, justify="left" if heading == "work" else "right")
    for name, found in curves.items():
        table.add_row(name, *(f"{nbytes / found.at(nbytes) / 1e9:.2f}" for nbytes in sizes))
    return table
