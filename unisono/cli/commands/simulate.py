"""``unisono simulate``: predicts the time of a collective on a described machine, at any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from unisono.algorithms.builders.arguments import check_ranks
from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.catalogue.registry import algorithms_of, find
from unisono.algorithms.composition.phases import Composition
from unisono.cli.commands.show import given_parameters
from unisono.cli.options.completion import algorithms as complete_algorithms, collectives as complete_collectives
from unisono.cli.options.loading import load_option
from unisono.cli.options.sizes import nbytes_moved, nbytes_option
from unisono.cli.output.terminal import add_names, console, progress
from unisono.errors import NoAlgorithmError, UsageError
from unisono.tuning.machine.parameters import LINKS
from unisono.tuning.machine.topology import Topology, flat
from unisono.tuning.machine.topology_files import MOST_RANKS, load
from unisono.tuning.simulator.simulate import ENGINES, Simulation, least_s, simulate


@click.command(short_help="Predict a collective on a described machine, at any number of ranks.")
@click.argument("collective", shell_complete=complete_collectives)
@click.argument("algorithms", shell_complete=complete_algorithms, metavar="ALGORITHM...", nargs=-1, required=True)
@click.option("-n", "size", type=click.IntRange(1, MOST_RANKS), default=8, show_default=True, help="Number of ranks.")
@nbytes_option
@click.option("--topology", type=click.Path(dir_okay=False, path_type=Path), help="File that describes the machine.")
@click.option(
    "--link", type=click.Choice(list(LINKS)), help="Link between all ranks, without --topology.  [default: shm]"
)
@click.option("--root", type=int, default=0, show_default=True, help="Root of the collective.")
@click.option("--segments", type=click.IntRange(min=1), default=1, show_default=True, help="Segments of each block.")
@click.option("--param", "params", multiple=True, metavar="NAME=VALUE", help="Parameter of the algorithm: radix=4.")
@click.option("--engine", type=click.Choice(ENGINES), default="auto", show_default=True, help="How to simulate.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
@load_option
def command(
    collective: str,
    algorithms: tuple[str, ...],
    size: int,
    nbytes: int,
    topology: Path | None,
    link: str | None,
    root: int,
    segments: int,
    params: tuple[str, ...],
    engine: str,
    as_json: bool,
) -> None:
    """Predict the time that each ALGORITHM (or "all" of them) takes for COLLECTIVE.

    For example: unisono simulate allreduce ring rabenseifner -n 8192 --size 100M --topology machine.toml
    """
    if topology is not None and link is not None:
        raise UsageError("the topology already has links: use either --topology or --link")
    check_ranks(size, 0, root)
    nbytes = nbytes_moved(collective, nbytes)
    over = load(topology).over(size) if topology else flat(size, LINKS[link or "shm"])
    chosen = algorithms_of(collective).values() if algorithms == ("all",) else [find(collective, n) for n in algorithms]
    simulations, refused = list[Simulation](), list[str]()
    with progress() as bar:
        for algorithm in bar.track(list(chosen), description=collective):
            bar.update(bar.task_ids[0], description=f"{collective} {algorithm.name}")
            try:
                arguments = _parameters(algorithm, params, over)
                simulations.append(
                    simulate(algorithm, nbytes, over, segments=segments, root=root, params=arguments, engine=engine)
                )
            except (NoAlgorithmError, UsageError) as error:
                if algorithms != ("all",):
                    raise
                refused.append(f"{algorithm.name}: {error}")
    simulations.sort(key=lambda each: each.seconds)
    bound_s = least_s(collective, nbytes, over)
    if as_json:
        rows = [simulation_to_json(each) for each in simulations]
        click.echo(json.dumps({"least_s": bound_s, "simulations": rows, "refused": refused}))
        return
    terminal = console()
    terminal.print(_table(simulations, over))
    terminal.print(f"no algorithm takes less than {_us(bound_s)} µs", highlight=False)
    for line in refused:
        terminal.print(f"refused: {line}", highlight=False)


def _parameters(algorithm: Algorithm, params: tuple[str, ...], over: Topology) -> dict[str, Any]:
    """Return the parameters from the command line and, for compositions, the hosts of the topology."""
    arguments = given_parameters(algorithm, params)
    has_hosts = isinstance(algorithm, Composition) and len(over.levels) > 1
    return {"hosts": over.hosts(), **arguments} if has_hosts else arguments


def simulation_to_json(simulation: Simulation) -> dict[str, Any]:
    """Return a simulation in its JSON form."""
    name, busy_s = simulation.busiest
    return {
        **{field: getattr(simulation, field) for field in Simulation._fields[:7]},
        "earliest_s": float(simulation.finish_s.min(initial=simulation.seconds)),
        "levels": [level._asdict() for level in simulation.levels],
        "busiest": {"resource": name, "busy_s": busy_s},
    }


def megabytes_by_level(simulation: Simulation) -> list[str]:
    """Return the MB over each level of the machine, for a table."""
    return [
        f"{level.nbytes / 1e6:,.3g}" if level.nbytes < 1e9 else f"{level.nbytes / 1e6:,.0f}"
        for level in simulation.levels
    ]


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"


def _table(simulations: list[Simulation], over: Topology) -> Table:
    first = simulations[0] if simulations else None
    title = f"{first.collective}, {first.nbytes:,} B, {first.size:,} ranks" if first else "nothing can be simulated"
    table = Table(title=title)
    add_names(table, "algorithm", [each.algorithm for each in simulations])
    for heading in ("segments", "µs", *(f"MB by {level.name}" for level in over.levels)):
        table.add_column(heading, justify="right")
    for heading in ("busiest", "busy", "engine"):
        table.add_column(heading, justify="right" if heading == "busy" else "left")
    for simulation in simulations:
        name, busy_s = simulation.busiest
        levels = megabytes_by_level(simulation)
        time, engine = _us(simulation.seconds), simulation.engine
        busy = f"{busy_s / simulation.seconds:.0%}" if simulation.seconds else ""
        table.add_row(simulation.algorithm, str(simulation.segments), time, *levels, name, busy, engine)
    return table
