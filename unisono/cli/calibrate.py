"""``unisono calibrate``: what links and memory of this machine cost, for the model to choose by."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import NamedTuple

import click
from rich.table import Table

from unisono.algorithms.variants import Variant
from unisono.bench.sizes import format_size
from unisono.cli.counts import numbers_of_ranks
from unisono.cli.terminal import console
from unisono.collectives.communicator import Communicator
from unisono.collectives.environment import detect
from unisono.collectives.init import init
from unisono.collectives.probes import calibrated, rounds_calibrated
from unisono.collectives.trials import Trials
from unisono.errors import CollectiveTimeoutError
from unisono.launchers.launch import launch
from unisono.options import Options
from unisono.timers import after
from unisono.tuning.choice import Known, candidate
from unisono.tuning.identity import fingerprint, keep, parameters_of
from unisono.tuning.parameters import UNBOUNDED, Parameters, to_json
from unisono.tuning.race import typical_s

# Whole collectives by which the model is checked, a ring and a butterfly, and their bytes.
_CHECKS = (("allgather", "ring"), ("allreduce", "recursive_doubling"))
_CHECKED = (64, 16 << 10, 1 << 20)
# After how long what is measured over one transport, by one number of ranks, is given up; usual are seconds.
_LIMITS_S = {"short": 60.0, "long": 300.0}


class Check(NamedTuple):
    """What the model predicts of a collective, and what it took."""

    collective: str
    algorithm: str
    nbytes: int
    predicted_s: float
    measured_s: float


def measure(comm: Communicator, known: Parameters, short: bool) -> tuple[Parameters, list[Check]]:
    """Calibrate, on every rank of `comm`, and check the model."""
    parameters = calibrated(comm, known, short=short)
    trials = Trials(comm, known=Known(None, parameters))
    found = list[Check]()
    for collective, name in _CHECKS:
        for nbytes in _CHECKED:
            asked = trials.question(collective, nbytes)
            predicted_s = candidate(Variant(name), asked, trials.known, None, is_named=True).predicted_s
            if predicted_s is not None and trials.prepare(collective, nbytes, name) is None:
                times, _ = trials.run(collective, nbytes, name)
                found.append(Check(collective, name, nbytes, predicted_s, typical_s(times)))
    return parameters, found


def measure_rounds(comm: Communicator, known: Parameters, short: bool) -> Parameters:
    """Calibrate what rounds among all ranks of `comm` cost."""
    return rounds_calibrated(comm, known, short=short)


class _Measured(NamedTuple):
    parameters: Parameters
    checks: tuple[tuple[str, Check], ...] = ()


def _measured_in_job(known: _Measured, short: bool) -> _Measured:
    """Return what is known with what the ranks of the job measure that this process is one of; rank 0's counts."""
    limit_s = _LIMITS_S["short" if short else "long"]
    giving_up = f"the ranks have not been measured within {limit_s:g} s: one hangs, or their link is very slow"
    # Any rank may be the one that hangs.
    with init() as world, after(limit_s, world.abort, giving_up):
        link = world.explain("allreduce", _CHECKED[0]).question.link
        parameters, checks = measure(world, known.parameters, short)
    return _Measured(parameters, tuple((link, each) for each in checks))


def _measured_here(known: _Measured, transport: str, ranks: int, short: bool) -> _Measured:
    """Return what is known with what so many ranks measure over a transport.

    Raises:
        CollectiveTimeoutError: they have not ended in time.
    """
    limit_s, options = _LIMITS_S["short" if short else "long"], Options(transports=transport)
    try:
        if ranks > 2:
            found = launch(measure_rounds, ranks, known.parameters, short, options=options, timeout_s=limit_s)
            return known._replace(parameters=found[0])
        both = launch(measure, ranks, known.parameters, short, bind="core", options=options, timeout_s=limit_s)
    except CollectiveTimeoutError as error:
        what = f"{ranks} ranks by {transport} have not been measured within {limit_s:g} s"
        advice = "a rank hangs, or the link is very slow; what was measured before is kept"
        raise CollectiveTimeoutError(f"{what}: {advice} ({error.message})") from None
    parameters, checks = both[0]
    return _Measured(parameters, (*known.checks, *((transport, each) for each in checks)))


@click.command(short_help="Measure the links and the memory of this machine.")
@click.option("-n", "counts", default="2", show_default=True, callback=numbers_of_ranks, help="Ranks, as 2,4,8.")
@click.option("--transport", type=click.Choice(["shm", "tcp", "all"]), default="all", show_default=True)
@click.option("--short", is_flag=True, help="Take a second or two for each transport, and fewer sizes.")
@click.option("--json", "as_json", is_flag=True, help="Print the parameters as JSON.")
def command(*, counts: tuple[int, ...], transport: str, short: bool, as_json: bool) -> None:
    """Measure what messages, reductions and copies take, and keep it in the user's cache folder.

    Messages and memory are measured between two ranks that have a core each, and rounds of collectives among as many
    ranks as -n says, as they share the cores.

    Under torchrun, mpirun, srun or unisono run it measures the links and the rounds of the ranks of that job, whatever
    -n and --transport are: between hosts, too, and there how many pairs of ranks have the full bandwidth at once.

    What has not been measured over a transport, by a number of ranks, within five minutes (one with --short) is given
    up, and what was measured before is kept.

    From then on, every job whose rank 0 is on such a machine chooses algorithms by it, where no table says better.
    """
    machine = fingerprint()
    found = before = _Measured(parameters_of(machine))
    in_job = detect(os.environ)
    if in_job.size > 1:
        found = _measured_in_job(before, short)
        if in_job.rank == 0:
            _tell(found, keep(machine, found.parameters), as_json)
        return
    path: str | None = None
    try:
        for name in ("shm", "tcp") if transport == "all" else (transport,):
            for ranks in (2, *(each for each in counts if each > 2)):
                found = _measured_here(found, name, ranks, short)
    finally:
        if found is not before:
            path = keep(machine, found.parameters)
    _tell(found, path, as_json)


def _tell(found: _Measured, path: str | None, as_json: bool) -> None:
    """Print what was measured, and where it is kept."""
    parameters, checks = found
    if as_json:
        click.echo(json.dumps(to_json(parameters), indent=2))
        return
    shown = console()
    shown.print(_links(parameters))
    shown.print(_memory(parameters))
    shown.print(_checked(checks))
    if path is not None:
        shown.print(f"kept in {path}", highlight=False)


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


def _checked(checks: Sequence[tuple[str, Check]]) -> Table:
    table = Table(title="The model, checked by a ring and a butterfly")
    for heading in ("link", "call", "bytes", "predicted µs", "measured µs", "error"):
        table.add_column(heading, justify="left" if heading in ("link", "call") else "right")
    for link, each in checks:
        times = f"{each.predicted_s * 1e6:.1f}", f"{each.measured_s * 1e6:.1f}"
        error = f"{each.predicted_s / each.measured_s - 1:+.0%}"
        table.add_row(link, f"{each.collective} {each.algorithm}", format_size(each.nbytes), *times, error)
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
