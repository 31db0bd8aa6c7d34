"""``unisono explain``: explains which algorithm a call would use. No call is run."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import click
from click.core import ParameterSource
from rich.table import Table

from unisono.algorithms.catalogue.registry import find
from unisono.algorithms.catalogue.variants import is_rules
from unisono.algorithms.composition.host_levels import Hosts
from unisono.algorithms.ir.contracts import VECTOR_CALLS
from unisono.cli.options.completion import algorithms as complete_algorithms, collectives as complete_collectives
from unisono.cli.options.loading import load_option
from unisono.cli.options.outputs import PICTURE
from unisono.cli.options.sizes import checked_nbytes, nbytes_moved
from unisono.cli.output.network_map import draw_map, explained_map, map_table, order_text
from unisono.cli.output.terminal import add_names, console
from unisono.dtypes import DTYPES
from unisono.errors import NoAlgorithmError, UsageError
from unisono.options import Options
from unisono.tuning.decide.choice import Candidate, Choice, Explanation, Question, TunerState, builder_params, explain
from unisono.tuning.decide.device_routes import LINK, explain_route, routes_of
from unisono.tuning.decide.forced_rules import forced
from unisono.tuning.machine.fingerprint import fingerprint
from unisono.tuning.machine.network_map import NetworkMap
from unisono.tuning.machine.parameters import LINKS, at_level
from unisono.tuning.machine.topology import Topology
from unisono.tuning.measure.calibration_files import Origin, parameters_of, read


@click.command(short_help="Explain which algorithm a call uses, and why.")
@click.argument("collective", shell_complete=complete_collectives, required=False)
@click.argument("nbytes", metavar="[BYTES]", callback=checked_nbytes, required=False)
@click.option("-n", "size", type=click.IntRange(min=1), default=2, show_default=True, help="Number of ranks.")
@click.option("--per-host", type=click.IntRange(min=1), help="Ranks on each host.  [default: all, on one host]")
@click.option("--size", "vector", callback=checked_nbytes, help="Bytes of the vector, instead of BYTES.  [default: 1M]")
@click.option("--link", type=click.Choice(list(LINKS)), help="Between the hosts.  [default: tcp, or shm on one host]")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float32", metavar="DTYPE", help="Of the elements.")
@click.option(
    "--algorithm",
    shell_complete=complete_algorithms,
    help="Force an algorithm by name, or by rules as in UNISONO_ALGORITHM.",
)
@click.option(
    "--table", type=click.Path(dir_okay=False, path_type=Path), help="Decision table.  [default: UNISONO_TABLE]"
)
@click.option("--topology", type=click.Path(dir_okay=False, path_type=Path), help="Simulate on a described machine.")
@click.option(
    "--map",
    "network",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Map of far hosts, which `world.network.write` or `unisono bench wan --map` wrote.",
)
@click.option("--svg", type=PICTURE, help="Draw the map, and the ways that the call uses, into this file.")
@click.option("--root", type=click.IntRange(min=0), default=0, show_default=True, help="Root of the collective.")
@click.option(
    "--memory",
    type=click.Choice(["host", "device"]),
    default="host",
    show_default=True,
    help="Where the arrays are; device: on a GPU of each rank, by the times of a table.",
)
@click.option(
    "--dumps",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Compare the calls of a job that ran with predictions, by the dumps of its ranks.",
)
@click.option("--job", default="", metavar="ID", help="The job, where DIR has dumps of several.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
@load_option
def command(
    *,
    collective: str | None,
    nbytes: int | None,
    size: int,
    per_host: int | None,
    vector: int | None,
    link: str | None,
    dtype: str,
    algorithm: str | None,
    table: Path | None,
    topology: Path | None,
    network: Path | None,
    svg: Path | None,
    root: int,
    memory: str,
    dumps: Path | None,
    job: str,
    as_json: bool,
) -> None:
    """Explain which algorithm runs COLLECTIVE, and why; for example: unisono explain allreduce 1MiB -n 4.

    It uses the same settings as a job started here: UNISONO_ALGORITHM, UNISONO_TABLE, the calibration of this machine,
    and the number of ranks for each core. All ranks are on one host unless --per-host is given. For a call with counts,
    such as allgatherv, BYTES is the sum of all ranks.
    With --topology, the times of all candidates are simulated on the machine that the file describes. With --map, they
    are simulated on the hosts of the file, with one rank on each host or as many as --per-host says.

    With --dumps and without COLLECTIVE, it shows the calls that a job made, beside their predictions by the table, the
    model or --topology, and which calls another algorithm would make faster. Ranks write dumps by world.dump(DIR), and
    on SIGUSR1.
    """
    if collective is None:
        _explain_job(dumps, job, topology, str(table or Options.from_environment(os.environ).table), as_json)
        return
    _check_sources(svg, dumps, network, topology, link, memory)
    if nbytes is not None and vector is not None:
        raise UsageError("BYTES and --size both set the number of bytes: use only one")
    if topology is not None and (per_host or link):
        raise UsageError("a topology already has hosts and links: omit --per-host and --link")
    length = nbytes_moved(collective, next((each for each in (nbytes, vector) if each is not None), 1 << 20))
    measured = None if network is None else NetworkMap.read(network)
    if measured is not None:
        per_host = per_host or 1
        size = _size_on(measured, size, per_host)
    if root >= size:
        raise UsageError(f"there is no rank {root} among {size} ranks")
    options = Options.from_environment(os.environ)
    name = VECTOR_CALLS.get(collective, collective)
    requested = algorithm or options.algorithm
    if is_rules(requested):
        requested = forced(requested, name, length)
    hosts, link = _placed(size, per_host, link)
    question = Question(
        name,
        length,
        size,
        link,
        algorithm=requested,
        varying=collective in VECTOR_CALLS,
        hosts=hosts,
        crowd=max(1.0, max(map(len, hosts), default=1) / _cores()),
        dtype="plain" if DTYPES[dtype].accumulate == dtype else "narrow",
        memory=memory,
        root=root,
    )
    explanation, place, source = _explained(question, topology, str(table or options.table), measured)
    of_map = None if measured is None else explained_map(explanation, measured)
    if of_map is not None and svg is not None:
        draw_map(svg, f"{collective} of {length} B: {explanation.choice.variant}", of_map)
    if as_json:
        more = {} if of_map is None else {"network": of_map.as_json()}
        click.echo(json.dumps({**dataclasses.asdict(explanation), "source": source, **more}, indent=2))
        return
    shown = console()
    shown.print(_table(explanation, collective, place))
    shown.print(source, highlight=False)
    if of_map is not None:
        shown.print(map_table(of_map))
        shown.print(order_text(of_map), highlight=False)
    if topology is None and len(hosts) == 1 and question.crowd > 1:
        note = f"{size} ranks share {_cores()} cores here; for ranks on several hosts: --per-host"
        shown.print(note, highlight=False)


def _check_sources(
    svg: Path | None, dumps: Path | None, network: Path | None, topology: Path | None, link: str | None, memory: str
) -> None:
    if dumps is not None:
        raise UsageError("--dumps explains the calls of a job: omit the collective and its size")
    if svg is not None and network is None:
        raise UsageError("--svg draws the map of a network: add --map")
    if network is not None and (topology or link or memory == "device"):
        raise UsageError("--map already has hosts and links, and no GPUs: omit --topology, --link and --memory")


def _explain_job(place: Path | None, job: str, topology: Path | None, table: str, as_json: bool) -> None:
    """Show the calls of a job that ran beside their predictions."""
    if place is None:
        raise UsageError("name a collective, such as allreduce, or a job by --dumps")
    from unisono.cli.output import ran_calls
    from unisono.postmortem.loading import load
    from unisono.postmortem.timings import times_of

    dumps = load([place], job)
    sources = list[str]()

    def explained(question: Question) -> Explanation:
        explanation, _, source = _explained(question, topology, table)
        sources.append(source)
        return explanation

    rows = list(ran_calls.compared(times_of(dumps), explained, _cores()))
    if as_json:
        click.echo(json.dumps([ran_calls.as_json(row) for row in rows], indent=2))
        return
    shown = console()
    for note in dumps.notes:
        shown.print(note, style="yellow", highlight=False, markup=False)
    shown.print(ran_calls.shown_calls(rows, dumps.job))
    for line in (*dict.fromkeys(sources), ran_calls.advice(rows)):
        shown.print(line, highlight=False)


def _size_on(network: NetworkMap, size: int, per_host: int) -> int:
    """Return the number of ranks on the hosts of a map; raises UsageError if the caller has set another one."""
    on_hosts = network.hosts * per_host
    source = click.get_current_context().get_parameter_source("size")
    if source is not ParameterSource.DEFAULT and size != on_hosts:
        raise UsageError(f"the map has {network.hosts} hosts, and so {on_hosts} ranks, not {size}: omit -n")
    return on_hosts


def _explained(
    question: Question, topology: Path | None, table: str, network: NetworkMap | None = None
) -> tuple[Explanation, str, str]:
    """Return the explanation, the hosts of its ranks in words, and the source of its times."""
    if question.memory == "device":
        if topology is not None:
            raise UsageError("times on GPUs are measured, and not simulated: omit --topology")
        able = dict.fromkeys(routes_of(question.collective))
        on_device = dataclasses.replace(question, link=question.link if len(question.hosts) > 1 else LINK)
        explanation = explain_route(on_device, able, _tuner_state(Path(table) if table else None))
        return (
            explanation,
            f"on GPUs, {_place(on_device)}",
            "times on GPUs come from a table; without one, a rule decides",
        )
    if topology is None and network is not None:
        state = _tuner_state(Path(table) if table else None).over(network, at_level(question.link, question.level))
        return explain(question, state), _place(question), "times are simulated on the map"
    if topology is None:
        explanation = explain(question, _tuner_state(Path(table) if table else None))
        return explanation, _place(question), _source(explanation)
    from unisono.tuning.machine.topology_files import load

    source = f"times are simulated on {topology}"
    return simulated(question, load(topology).over(question.size)), f"on {topology}", source


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _placed(size: int, per_host: int | None, link: str | None) -> tuple[Hosts, str]:
    """Return the ranks of each host, which are known only for shm or with `per_host`, and the link between hosts."""
    if per_host is None:
        return ((tuple(range(size)),) if link in (None, "shm") else ()), link or "shm"
    hosts = tuple(tuple(range(first, min(first + per_host, size))) for first in range(0, size, per_host))
    if len(hosts) > 1 and link == "shm":
        raise UsageError(f"--per-host {per_host} puts {size} ranks on {len(hosts)} hosts, which cannot use shm")
    return hosts, link or ("tcp" if len(hosts) > 1 else "shm")


def _place(question: Question) -> str:
    """Return the hosts and links of the ranks in words, for the title."""
    if len(question.hosts) > 1:
        return f"on {len(question.hosts)} hosts, by {question.inside} inside them and by {question.link} between them"
    if not question.hosts:
        return f"by {question.link}"
    return f"by {question.link} on one host"


def _source(explanation: Explanation) -> str:
    """Return the source of the predicted times: the calibration of this machine with its date, or the defaults."""
    question = explanation.question
    calibration = read(fingerprint()) if explanation.is_calibrated else None
    if calibration is None:
        return f"predicted with default costs: {question.link} is not calibrated here (`unisono calibrate` measures it)"
    level = at_level(question.link, question.level)
    name = level if level in calibration.parameters.links else question.link
    origin = calibration.origins.get(name, Origin())
    return f"predicted by the calibration of {name} on this machine ({origin}), in {calibration.path}"


def _tuner_state(table: Path | None) -> TunerState:
    from unisono.tuning.decide.table import loaded

    machine = fingerprint()
    return TunerState(loaded(table).of(machine, str(table)) if table else None, parameters_of(machine), machine)


def simulated(question: Question, over: Topology) -> Explanation:
    """Return the explanation with candidates simulated on a topology and the fastest one chosen.

    Raises:
        NoAlgorithmError: every candidate is refused.
    """
    hosts: Hosts = over.hosts() if len(over.levels) > 1 else ()
    question = dataclasses.replace(question, hosts=hosts, link="shm" if not hosts else "tcp", crowd=1.0)
    explanation = explain(question)
    rows = sorted(
        (_simulated(each, question, over) for each in explanation.candidates),
        key=lambda each: (each.refusal is not None, each.predicted_s or 0.0),
    )
    best = next(each for each in rows if question.algorithm in ("auto", each.variant))
    if best.refusal is not None:
        raise NoAlgorithmError(f"no algorithm carries out {question.collective} on this topology: {best.refusal}")
    tier = "forced" if question.algorithm != "auto" else "simulation"
    choice = Choice(best.algorithm, best.segments, tier, best.predicted_s, best.params, best.variant)
    return Explanation(question, tuple(rows), choice)


def _simulated(candidate: Candidate, question: Question, over: Topology) -> Candidate:
    if candidate.refusal is not None:
        return candidate
    from unisono.tuning.simulator.simulate import simulate

    try:
        hosts = {"hosts": question.hosts} if candidate.phases and question.hosts else {}
        params = {**hosts, **dict(candidate.phases), **candidate.chosen_params, **builder_params(candidate.params)}
        algorithm = find(question.collective, candidate.algorithm)
        seconds = simulate(algorithm, question.nbytes, over, segments=candidate.segments, params=params).seconds
    except (NoAlgorithmError, UsageError) as error:
        return dataclasses.replace(candidate, predicted_s=None, refusal=f"cannot be simulated: {error.message}")
    return dataclasses.replace(candidate, predicted_s=seconds)


def _table(explanation: Explanation, collective: str, place: str) -> Table:
    question, choice = explanation.question, explanation.choice
    title = f"{collective}, {question.nbytes} B, {question.size} ranks {place}: {choice.variant} ({choice.tier})"
    table = Table(title=title)
    is_measured = any(each.measured_s is not None for each in explanation.candidates)
    table.add_column("")
    add_names(table, "algorithm", [each.in_order for each in explanation.candidates])
    for heading in (*(("measured µs",) if is_measured else ()), "predicted µs", "segments"):
        table.add_column(heading, justify="right")
    table.add_column("refused because")
    for candidate in explanation.candidates:
        chosen = "*" if candidate.in_order == choice.variant else ""
        times = [candidate.measured_s, candidate.predicted_s] if is_measured else [candidate.predicted_s]
        shown = ["" if seconds is None else f"{seconds * 1e6:.1f}" for seconds in times]
        table.add_row(chosen, candidate.in_order, *shown, str(candidate.segments), candidate.refusal or "")
    return table
