"""``unisono explain``: which algorithm a call would use, and why. Nothing is run."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import click
from rich.table import Table

from unisono.algorithms.catalogue.registry import find
from unisono.algorithms.catalogue.variants import is_rules
from unisono.algorithms.composition.host_levels import Hosts
from unisono.algorithms.ir.contracts import VECTOR_CALLS
from unisono.cli.loading import load_option
from unisono.cli.terminal import add_names, console
from unisono.dtypes import DTYPES
from unisono.errors import NoAlgorithmError, UsageError
from unisono.options import Options, parse_nbytes
from unisono.tuning.decide.choice import Candidate, Choice, Explanation, Question, TunerState, builder_params, explain
from unisono.tuning.decide.forced_rules import forced
from unisono.tuning.machine.fingerprint import fingerprint
from unisono.tuning.machine.parameters import LINKS, at_level
from unisono.tuning.machine.topology import Topology
from unisono.tuning.measure.calibration_files import Origin, parameters_of, read


def _nbytes(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    try:
        return None if text is None else parse_nbytes(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not {error}.") from None


@click.command(short_help="Tell which algorithm is chosen for a call, and why.")
@click.argument("collective")
@click.argument("nbytes", metavar="[BYTES]", callback=_nbytes, required=False)
@click.option("-n", "size", type=click.IntRange(min=1), default=2, show_default=True, help="Number of ranks.")
@click.option("--per-host", type=click.IntRange(min=1), help="Ranks on each host.  [default: all, on one host]")
@click.option("--size", "vector", callback=_nbytes, help="Bytes of the vector, if not given before.  [default: 1M]")
@click.option("--link", type=click.Choice(list(LINKS)), help="Between the hosts.  [default: tcp, or shm on one host]")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float32", metavar="DTYPE", help="Of the elements.")
@click.option("--algorithm", help="Force an algorithm by name, or by rules as UNISONO_ALGORITHM has them.")
@click.option(
    "--table", type=click.Path(dir_okay=False, path_type=Path), help="Decision table.  [default: UNISONO_TABLE]"
)
@click.option("--topology", type=click.Path(dir_okay=False, path_type=Path), help="Simulate on a described machine.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
@load_option
def command(
    *,
    collective: str,
    nbytes: int | None,
    size: int,
    per_host: int | None,
    vector: int | None,
    link: str | None,
    dtype: str,
    algorithm: str | None,
    table: Path | None,
    topology: Path | None,
    as_json: bool,
) -> None:
    """Tell which algorithm carries out COLLECTIVE, and why; for example: unisono explain allreduce 1MiB -n 4.

    It looks at what a job started here would: UNISONO_ALGORITHM, UNISONO_TABLE, the calibration of this machine, and
    how many ranks share a core. All ranks are on one host unless --per-host says how many are on each. A call with
    counts, such as allgatherv, has the bytes of all shares.
    With --topology, the times of all candidates are simulated on the machine that the file describes.
    """
    if nbytes is not None and vector is not None:
        raise UsageError("the bytes are given twice: give them after the collective, or by --size")
    if topology is not None and (per_host or link):
        raise UsageError("a topology says what is between the ranks: leave --per-host and --link out")
    length = next((each for each in (nbytes, vector) if each is not None), 1 if collective == "barrier" else 1 << 20)
    options = Options.from_environment(os.environ)
    name = VECTOR_CALLS.get(collective, collective)
    wanted = algorithm or options.algorithm
    if is_rules(wanted):
        wanted = forced(wanted, name, length)
    hosts, link = _placed(size, per_host, link)
    asked = Question(
        name,
        length,
        size,
        link,
        algorithm=wanted,
        varying=collective in VECTOR_CALLS,
        hosts=hosts,
        crowd=max(1.0, max(map(len, hosts), default=1) / _cores()),
        dtype="plain" if DTYPES[dtype].accumulate == dtype else "narrow",
    )
    found, place, source = _explained(asked, topology, str(table or options.table))
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(found), "source": source}, indent=2))
        return
    shown = console()
    shown.print(_table(found, collective, place))
    shown.print(source, highlight=False)
    if topology is None and len(hosts) == 1 and asked.crowd > 1:
        told = f"{size} ranks share {_cores()} cores here; for ranks on several hosts: --per-host"
        shown.print(told, highlight=False)


def _explained(asked: Question, topology: Path | None, table: str) -> tuple[Explanation, str, str]:
    """Return the explanation, where the ranks are in it, and where its times are from."""
    if topology is None:
        found = explain(asked, _known(Path(table) if table else None))
        return found, _place(asked), _source(found)
    from unisono.tuning.machine.topology_files import load

    return simulated(asked, load(topology).over(asked.size)), f"on {topology}", f"times are simulated on {topology}"


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _placed(size: int, per_host: int | None, link: str | None) -> tuple[Hosts, str]:
    """Return the ranks of each host, and the link between the hosts; by another link than shm, nobody knows them."""
    if per_host is None:
        return ((tuple(range(size)),) if link in (None, "shm") else ()), link or "shm"
    hosts = tuple(tuple(range(first, min(first + per_host, size))) for first in range(0, size, per_host))
    if len(hosts) > 1 and link == "shm":
        raise UsageError(f"--per-host {per_host} puts {size} ranks on {len(hosts)} hosts, which share no memory")
    return hosts, link or ("tcp" if len(hosts) > 1 else "shm")


def _place(asked: Question) -> str:
    """Return where the ranks are taken to be, for the title."""
    if len(asked.hosts) > 1:
        return f"on {len(asked.hosts)} hosts, by {asked.inside} inside them and by {asked.link} between them"
    if not asked.hosts:
        return f"by {asked.link}"
    return f"by {asked.link} on one host"


def _source(found: Explanation) -> str:
    """Return where the predicted times are from: the calibration of this machine and its date, or priors."""
    asked = found.question
    calibration = read(fingerprint()) if found.is_calibrated else None
    if calibration is None:
        return f"predicted by priors: {asked.link} is not calibrated on this machine (`unisono calibrate` measures it)"
    level = at_level(asked.link, asked.level)
    name = level if level in calibration.parameters.links else asked.link
    origin = calibration.origins.get(name, Origin())
    return f"predicted by the calibration of {name} on this machine ({origin}), in {calibration.path}"


def _known(table: Path | None) -> TunerState:
    from unisono.tuning.decide.table import loaded

    machine = fingerprint()
    return TunerState(loaded(table) if table else None, parameters_of(machine), machine)


def simulated(asked: Question, over: Topology) -> Explanation:
    """Return the explanation in which candidates are simulated on a topology, and the fastest one is chosen.

    Raises:
        NoAlgorithmError: every candidate is refused.
    """
    hosts: Hosts = over.hosts() if len(over.levels) > 1 else ()
    asked = dataclasses.replace(asked, hosts=hosts, link="shm" if not hosts else "tcp", crowd=1.0)
    found = explain(asked)
    rows = sorted(
        (_simulated(each, asked, over) for each in found.candidates),
        key=lambda each: (each.refusal is not None, each.predicted_s or 0.0),
    )
    best = next(each for each in rows if asked.algorithm in ("auto", each.variant))
    if best.refusal is not None:
        raise NoAlgorithmError(f"no algorithm carries out {asked.collective} on this topology: {best.refusal}")
    tier = "forced" if asked.algorithm != "auto" else "simulation"
    choice = Choice(best.algorithm, best.segments, tier, best.predicted_s, best.params, best.variant)
    return Explanation(asked, tuple(rows), choice)


def _simulated(each: Candidate, asked: Question, over: Topology) -> Candidate:
    if each.refusal is not None:
        return each
    from unisono.tuning.simulator.simulate import simulate

    try:
        hosts = {"hosts": asked.hosts} if each.phases and asked.hosts else {}
        params = {**hosts, **dict(each.phases), **builder_params(each.params)}
        algorithm = find(asked.collective, each.algorithm)
        seconds = simulate(algorithm, asked.nbytes, over, segments=each.segments, params=params).seconds
    except (NoAlgorithmError, UsageError) as error:
        return dataclasses.replace(each, predicted_s=None, refusal=f"cannot be simulated: {error.message}")
    return dataclasses.replace(each, predicted_s=seconds)


def _table(found: Explanation, collective: str, place: str) -> Table:
    asked, choice = found.question, found.choice
    title = f"{collective}, {asked.nbytes} B, {asked.size} ranks {place}: {choice.variant} ({choice.tier})"
    table = Table(title=title)
    is_measured = any(each.measured_s is not None for each in found.candidates)
    table.add_column("")
    add_names(table, "algorithm", [each.variant for each in found.candidates])
    for heading in (*(("measured µs",) if is_measured else ()), "predicted µs", "segments"):
        table.add_column(heading, justify="right")
    table.add_column("refused because")
    for candidate in found.candidates:
        chosen = "*" if candidate.variant == choice.variant else ""
        times = [candidate.measured_s, candidate.predicted_s] if is_measured else [candidate.predicted_s]
        shown = ["" if seconds is None else f"{seconds * 1e6:.1f}" for seconds in times]
        table.add_row(chosen, candidate.variant, *shown, str(candidate.segments), candidate.refusal or "")
    return table
