"""``unisono explain``: which algorithm a call would use, and why. Nothing is run."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import click
from rich.table import Table

from unisono.algorithms.hosts import Hosts
from unisono.algorithms.registry import find
from unisono.algorithms.variants import is_rules
from unisono.cli.terminal import console
from unisono.dtypes import DTYPES
from unisono.errors import NoAlgorithmError, UsageError
from unisono.options import Options, parse_nbytes
from unisono.tuning.choice import Candidate, Choice, Explanation, Known, Question, builder_params, explain
from unisono.tuning.forcing import forced
from unisono.tuning.identity import fingerprint, parameters_of
from unisono.tuning.parameters import LINKS
from unisono.tuning.topology import Topology


def _nbytes(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    try:
        return None if text is None else parse_nbytes(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not {error}.") from None


@click.command(short_help="Tell which algorithm is chosen for a call, and why.")
@click.argument("collective")
@click.argument("nbytes", metavar="[BYTES]", callback=_nbytes, required=False)
@click.option("-n", "size", type=click.IntRange(min=1), default=2, show_default=True, help="Number of ranks.")
@click.option("--size", "vector", callback=_nbytes, help="Bytes of the vector, if not given before.  [default: 1M]")
@click.option("--link", type=click.Choice(list(LINKS)), default="shm", show_default=True, help="Between the ranks.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float32", metavar="DTYPE", help="Of the elements.")
@click.option("--algorithm", help="Force an algorithm by name, or by rules as UNISONO_ALGORITHM has them.")
@click.option(
    "--table", type=click.Path(dir_okay=False, path_type=Path), help="Decision table.  [default: UNISONO_TABLE]"
)
@click.option("--topology", type=click.Path(dir_okay=False, path_type=Path), help="Simulate on a described machine.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
def command(
    *,
    collective: str,
    nbytes: int | None,
    size: int,
    vector: int | None,
    link: str,
    dtype: str,
    algorithm: str | None,
    table: Path | None,
    topology: Path | None,
    as_json: bool,
) -> None:
    """Tell which algorithm carries out COLLECTIVE, and why; for example: unisono explain allreduce 1MiB -n 4.

    It looks at what a job started here would: UNISONO_ALGORITHM, UNISONO_TABLE, the calibration of this machine, and
    how many ranks share a core.
    With --topology, the times of all candidates are simulated on the machine that the file describes.
    """
    if nbytes is not None and vector is not None:
        raise UsageError("the bytes are given twice: give them after the collective, or by --size")
    length = next((each for each in (nbytes, vector) if each is not None), 1 if collective == "barrier" else 1 << 20)
    options = Options.from_environment(os.environ)
    wanted = algorithm or options.algorithm
    if is_rules(wanted):
        wanted = forced(wanted, collective, length)
    narrow = DTYPES[dtype].accumulate != dtype
    asked = Question(collective, length, size, link, algorithm=wanted, dtype="narrow" if narrow else "plain")
    if link == "shm":
        cores = len(os.sched_getaffinity(0))
        asked = dataclasses.replace(asked, hosts=(tuple(range(size)),), crowd=max(1.0, size / cores))
    if topology is not None:
        from unisono.tuning.described import load

        found = simulated(asked, load(topology).over(size))
    else:
        path = table or (Path(options.table) if options.table else None)
        found = explain(asked, _known(path))
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        console().print(_table(found))


def _known(table: Path | None) -> Known:
    from unisono.tuning.table import loaded

    machine = fingerprint()
    return Known(loaded(table) if table else None, parameters_of(machine), machine)


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
    from unisono.tuning.simulate import simulate

    try:
        hosts = {"hosts": asked.hosts} if each.phases and asked.hosts else {}
        params = {**hosts, **dict(each.phases), **builder_params(each.params)}
        algorithm = find(asked.collective, each.algorithm)
        seconds = simulate(algorithm, asked.nbytes, over, segments=each.segments, params=params).seconds
    except (NoAlgorithmError, UsageError) as error:
        return dataclasses.replace(each, predicted_s=None, refusal=f"cannot be simulated: {error.message}")
    return dataclasses.replace(each, predicted_s=seconds)


def _table(found: Explanation) -> Table:
    asked, choice = found.question, found.choice
    title = (
        f"{asked.collective}, {asked.nbytes} B, {asked.size} ranks by {asked.link}: {choice.variant} ({choice.tier})"
    )
    table = Table(title=title)
    is_measured = any(each.measured_s is not None for each in found.candidates)
    headings = (
        "",
        "algorithm",
        *(("measured µs",) if is_measured else ()),
        "predicted µs",
        "segments",
        "refused because",
    )
    for heading in headings:
        table.add_column(heading, justify="right" if "µs" in heading or heading == "segments" else "left")
    for candidate in found.candidates:
        chosen = "*" if candidate.variant == choice.variant else ""
        times = [candidate.measured_s, candidate.predicted_s] if is_measured else [candidate.predicted_s]
        shown = ["" if seconds is None else f"{seconds * 1e6:.1f}" for seconds in times]
        table.add_row(chosen, candidate.variant, *shown, str(candidate.segments), candidate.refusal or "")
    return table
