"""``unisono calibrate``: measures the costs of this machine's links and memory, by which the model chooses."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import click
from rich.table import Table

from unisono import __version__
from unisono.algorithms.catalogue.variants import Variant
from unisono.bench.sizes import format_size
from unisono.cli.groups import SuggestingGroup
from unisono.cli.machine.load import MOST_OFF, Load, load_now
from unisono.cli.messages import tell
from unisono.cli.options.counts import numbers_of_ranks
from unisono.cli.options.loading import load_option, loaded_files
from unisono.cli.options.outputs import OutputFile, write_text
from unisono.cli.output.terminal import console
from unisono.collectives.bootstrap.environment import detect
from unisono.collectives.bootstrap.init import init
from unisono.collectives.communicator import Communicator
from unisono.collectives.measurement.call_trials import CallTrials
from unisono.collectives.measurement.link_probes import calibrated, rounds_calibrated
from unisono.collectives.measurement.topology_probes import topology_measured
from unisono.errors import CollectiveTimeoutError, UsageError
from unisono.foundation.watchdog import call_if_overdue
from unisono.launchers.launch import launch
from unisono.options import Options
from unisono.tuning.decide.choice import TunerState, candidate
from unisono.tuning.machine.fingerprint import describe, fingerprint
from unisono.tuning.machine.parameters import UNBOUNDED, Link, Parameters, to_json
from unisono.tuning.machine.topology import Level
from unisono.tuning.machine.topology_files import text_of
from unisono.tuning.measure import calibration_files
from unisono.tuning.measure.calibration_files import Calibration, Origin
from unisono.tuning.measure.race import typical_s

# The model is checked by calls of a ring and a butterfly, at these bytes.
_CHECKS = (("allgather", "ring"), ("allreduce", "recursive_doubling"))
_CHECKED = (64, 16 << 10, 1 << 20)
# The time limit for one transport and one number of ranks. A calibration usually takes seconds.
_LIMITS_S = {"short": 60.0, "long": 300.0}


class PredictedCall(NamedTuple):
    """A call with its predicted and its measured time."""

    collective: str
    algorithm: str
    nbytes: int
    predicted_s: float
    measured_s: float

    @property
    def factor(self) -> float:
        """The factor by which the prediction is off in either direction; at least 1."""
        return max(self.predicted_s / self.measured_s, self.measured_s / self.predicted_s)

    def __str__(self) -> str:
        times = f"predicted {self.predicted_s * 1e6:.1f} µs, measured {self.measured_s * 1e6:.1f} µs"
        return f"{self.collective} {self.algorithm} of {format_size(self.nbytes)}: {times}"


class CalibrationStep(NamedTuple):
    """One step of a calibration: the number of ranks over a link, and the parameters after it."""

    link: str
    ranks: int
    parameters: Parameters
    checks: tuple[PredictedCall, ...]

    @property
    def worst(self) -> PredictedCall | None:
        """The check with the largest error; None if there are no checks."""
        return max(self.checks, key=lambda check: check.factor, default=None)

    @property
    def is_credible(self) -> bool:
        """Whether the measured model is within `MOST_OFF` in all checks."""
        return self.worst is None or self.worst.factor <= MOST_OFF


def measure(comm: Communicator, parameters: Parameters, short: bool) -> tuple[Parameters, list[PredictedCall]]:
    """Calibrate on every rank of `comm`, and check the model."""
    parameters = calibrated(comm, parameters, short=short)
    return parameters, _check(comm, parameters)


def measure_rounds(comm: Communicator, parameters: Parameters, short: bool) -> tuple[Parameters, list[PredictedCall]]:
    """Calibrate the costs of rounds among all ranks of `comm`, and check the model."""
    parameters = rounds_calibrated(comm, parameters, short=short)
    return parameters, _check(comm, parameters)


def _check(comm: Communicator, parameters: Parameters) -> list[PredictedCall]:
    """Run some collectives on every rank of `comm`, and return their predicted and measured times."""
    trials = CallTrials(comm, tuner_state=TunerState(None, parameters))
    checks = list[PredictedCall]()
    for collective, name in _CHECKS:
        for nbytes in (trials.nbytes(collective, nbytes) for nbytes in _CHECKED):
            question = trials.question(collective, nbytes)
            predicted_s = candidate(Variant(name), question, trials.known, None, is_named=True).predicted_s
            if predicted_s is not None and trials.prepare(collective, nbytes, name) is None:
                times, _ = trials.run(collective, nbytes, name)
                checks.append(PredictedCall(collective, name, nbytes, predicted_s, typical_s(times)))
    return checks


def _measure_in_job(parameters: Parameters, short: bool) -> CalibrationStep:
    """Measure over the ranks of the job of this process; the result of rank 0 counts."""
    limit_s = _LIMITS_S["short" if short else "long"]
    giving_up = f"the ranks have not been measured within {limit_s:g} s: one hangs, or their link is very slow"
    # Every rank has a watchdog, because any rank may be the one that hangs.
    with init() as world, call_if_overdue(limit_s, world.abort, giving_up):
        link = world.explain("allreduce", _CHECKED[0]).question.link
        parameters, checks = measure(world, parameters, short)
        return CalibrationStep(link, world.size, parameters, tuple(checks))


def _measure_here(before: Parameters, transport: str, ranks: int, short: bool) -> CalibrationStep:
    """Measure local ranks over a transport.

    Raises:
        CollectiveTimeoutError: the ranks have not ended within the limit.
    """
    limit_s, options = _LIMITS_S["short" if short else "long"], Options(transports=transport, load=loaded_files())
    try:
        if ranks > 2:
            results = launch(measure_rounds, ranks, before, short, options=options, timeout_s=limit_s)
        else:
            results = launch(measure, ranks, before, short, bind="core", options=options, timeout_s=limit_s)
    except CollectiveTimeoutError as error:
        problem = f"{ranks} ranks by {transport} have not been measured within {limit_s:g} s"
        advice = "a rank hangs, or the link is very slow; earlier results are kept"
        raise CollectiveTimeoutError(f"{problem}: {advice} ({error.message})") from None
    parameters, checks = results[0]
    return CalibrationStep(transport, ranks, parameters, tuple(checks))


class _Calibrating:
    """The steps of one calibration, and the parameters that it keeps."""

    def __init__(self, machine: str, force: bool) -> None:
        self.load = load_now()
        self.steps: list[CalibrationStep] = []
        self._machine = machine
        self._force = force
        self.before = calibration_files.parameters_of(machine)
        self.parameters = self.before

    def add(self, step: CalibrationStep) -> bool:
        """Add a step; its parameters are used if it is credible or forced. Return whether they are."""
        self.steps.append(step)
        is_taken = self._force or step.is_credible
        if is_taken:
            self.parameters = step.parameters
        return is_taken

    @property
    def refused(self) -> list[CalibrationStep]:
        """The steps whose parameters are not used."""
        return [] if self._force else [step for step in self.steps if not step.is_credible]

    def keep(self) -> str | None:
        """Write the parameters to the cache; return the path, or None if nothing is new or writing fails."""
        if self.parameters == self.before:
            return None
        former = _former_calibration(self._machine)
        path = calibration_files.path_of(self._machine)
        origins = {**(former.origins if former else {}), **self._origins()}
        calibration = Calibration(self._machine, path, self.parameters, describe(), origins)
        return path if calibration_files.keep(calibration) else None

    def _origins(self) -> dict[str, Origin]:
        """Return the origins of the links that have changed."""
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes")
        taken = [step for step in self.steps if step not in self.refused]
        origins = dict[str, Origin]()
        for name in self._changed():
            factors = [step.worst.factor for step in taken if step.worst and step.link == name]
            worst_factor = max(factors, default=1.0)
            origins[name] = Origin(now, __version__, self.load.average, self.load.cores, worst_factor)
        return origins

    def _changed(self) -> list[str]:
        """Return the names of the links that were measured now."""
        old, new = self.before, self.parameters
        names = (*new.links, *new.rounds)
        return [
            name
            for name in dict.fromkeys(names)
            if old.links.get(name) != new.links.get(name) or old.rounds.get(name) != new.rounds.get(name)
        ]


def _former_calibration(machine: str) -> Calibration | None:
    """Return the calibration in the cache, or None if there is none that can be read."""
    try:
        return calibration_files.read(machine)
    except (OSError, ValueError):
        return None


@click.group(
    cls=SuggestingGroup, invoke_without_command=True, short_help="Measure the links and the memory of this machine."
)
@click.option("-n", "counts", default="2", show_default=True, callback=numbers_of_ranks, help="Ranks, such as 2,4,8.")
@click.option("--transports", "transport", type=click.Choice(["shm", "tcp", "all"]), default="all", show_default=True)
@click.option("--short", is_flag=True, help="Measure fewer sizes, in a second or two for each transport.")
@click.option("--force", is_flag=True, help="Keep the results even if their check fails.")
@click.option("--json", "as_json", is_flag=True, help="Print the parameters as JSON.")
@load_option
@click.pass_context
def command(
    context: click.Context, *, counts: tuple[int, ...], transport: str, short: bool, force: bool, as_json: bool
) -> int:
    """Measure the costs of messages, reductions and copies, and keep them in the user's cache folder.

    Messages and memory are measured between two ranks with a core each. Rounds of collectives are measured among as
    many ranks as -n says, which may share cores. Then a few collectives are predicted and measured. If the model is off
    by a factor of more than 4 in one of them, the machine was busy: this result is not kept, and the exit code is 1.

    Under torchrun, mpirun, srun or unisono run, the links and rounds of the ranks of that job are measured, and -n and
    --transports have no effect. Between hosts, it also measures how many pairs of ranks have full bandwidth at once.

    The limit for one transport and one number of ranks is five minutes (one with --short). A measurement that takes
    longer is aborted, and earlier results are kept.

    From then on, every job whose rank 0 is on such a machine uses these costs to choose algorithms, unless a decision
    table has better information.
    """
    if context.invoked_subcommand is not None:
        return 0
    run = _Calibrating(fingerprint(), force)
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


def _report(run: _Calibrating, path: str | None, as_json: bool) -> int:
    """Print the results, the refused steps and their reasons, and the path of the file; return the exit code."""
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


def _refusal(step: CalibrationStep, load: Load) -> str:
    assert step.worst is not None, "a step without checks is credible"
    error = f"its model is off by a factor of {step.worst.factor:.0f} in {step.worst}"
    advice = f"the machine was busy ({load}); calibrate it when it is quiet, or keep this result by --force"
    return f"the calibration of {step.ranks} ranks by {step.link} is not kept: {error}: {advice}"


@command.command("topology")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--short", is_flag=True, help="Measure fewer sizes.")
@load_option
def topology(file: Path, short: bool) -> None:
    """Measure the levels of the network between the ranks of this job, and write them to FILE.

    Start it as a job, such as: srun unisono calibrate topology machine.toml

    Hosts that are near each other by their latencies and bandwidths become a level. `unisono simulate` and `unisono
    place` read the file, which is JSON if its name ends in .json, and else TOML. Rank 0 writes it. If other work on the
    hosts hides the groups, the file has none, and says so.

    The limit is five minutes.
    """
    limit_s = _LIMITS_S["long"]
    giving_up = f"the ranks have not been measured within {limit_s:g} s: one hangs, or their link is very slow"
    with init() as world:
        if world.rank == 0:
            OutputFile().convert(file, None, None)  # other ranks may be on hosts without this folder
        with call_if_overdue(limit_s, world.abort, giving_up):
            description, doubt = topology_measured(world, f"measured over {world.size} ranks", short=short)
        if world.rank > 0:
            return
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes")
    if doubt:
        tell(doubt)
    about = (f"Measured by `unisono calibrate topology`, {now}.", *([f"Note: {doubt}."] if doubt else []))
    write_text(file, text_of(description, is_json=file.suffix == ".json", about=about))
    shown = console()
    shown.print(_levels(description.levels))
    shown.print(f"kept in {file}", soft_wrap=True, highlight=False)


def _levels(levels: Sequence[Level]) -> Table:
    table = Table(title="Levels, from the inside out")
    for heading in ("level", "parts", "latency µs", "overhead µs", "GB/s", "pairs at once"):
        table.add_column(heading, justify="left" if heading == "level" else "right")
    for level in levels:
        table.add_row(level.name, str(level.size or "any"), *_link_numbers(level.link))
    return table


@command.command("show")
def show() -> None:
    """List the calibrations in the cache folder: their machines, links, dates and errors."""
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
    for heading in ("transport", "ranks", "measured", "load", "model off by up to", "Unisono"):
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

    Later jobs on these machines choose algorithms with default costs, until the machine is calibrated again.
    """
    if everything and machines:
        raise UsageError("--all removes all calibrations: omit the fingerprints")
    usable, unusable = calibration_files.read_all()
    names = {calibration_files.path_of(calibration.machine): calibration.machine for calibration in usable}
    names |= {path: os.path.basename(path).removesuffix(".json") for path in unusable}
    for machine in names.values() if everything else machines or (fingerprint(),):
        if machine not in names.values():
            raise UsageError(f"there is no calibration of {machine!r}; {_list_of(names)}")
        calibration_files.forget(machine)
        click.echo(f"removed {calibration_files.path_of(machine)}")


def _list_of(names: Mapping[str, str]) -> str:
    return f"the cache has those of {', '.join(names.values())}" if names else "the cache has none"


def _links(parameters: Parameters) -> Table:
    table = Table(title="Transports")
    for heading in ("transport", "latency µs", "overhead µs", "GB/s", "pairs at once", "measured"):
        table.add_column(heading, justify="left" if heading in ("transport", "measured") else "right")
    for name, link in parameters.links.items():
        knots = link.step.nbytes
        measured = f"{len(knots)} sizes, to {format_size(knots[-1])}" if knots else "no: the default"
        table.add_row(name, *_link_numbers(link), measured)
    return table


def _link_numbers(link: Link) -> tuple[str, ...]:
    """Return the latency, the overhead, the rate and the pairs of a link, for a table."""
    rate = f"{1e-9 / link.per_byte_s:.2f}" if link.per_byte_s else ""
    pairs = "" if link.pairs == UNBOUNDED else f"{link.pairs:.1f}"
    return f"{link.latency_s * 1e6:.2f}", f"{link.overhead_s * 1e6:.2f}", rate, pairs


def _checked(steps: Sequence[CalibrationStep]) -> Table:
    table = Table(title="The model, checked by a ring and a butterfly")
    for heading in ("transport", "ranks", "call", "bytes", "predicted µs", "measured µs", "error"):
        table.add_column(heading, justify="left" if heading in ("transport", "call") else "right")
    for step in steps:
        for check in step.checks:
            times = f"{check.predicted_s * 1e6:.1f}", f"{check.measured_s * 1e6:.1f}"
            error = f"{check.predicted_s / check.measured_s - 1:+.0%}"
            style = "red" if check.factor > MOST_OFF else None
            call = f"{check.collective} {check.algorithm}"
            table.add_row(step.link, str(step.ranks), call, format_size(check.nbytes), *times, error, style=style)
    return table


def _memory(parameters: Parameters) -> Table:
    curves = {f"reduce {dtype}": times for dtype, times in parameters.reduce.items()} | {"copy": parameters.copy}
    sizes = next((times.nbytes for times in curves.values() if times.nbytes), ())
    table = Table(title="Memory, GB/s")
    for heading in ("work", *map(format_size, sizes)):
        table.add_column(heading, justify="left" if heading == "work" else "right")
    for name, times in curves.items():
        table.add_row(name, *(f"{nbytes / times.at(nbytes) / 1e9:.2f}" for nbytes in sizes))
    return table
