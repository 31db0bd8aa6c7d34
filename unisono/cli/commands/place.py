"""``unisono place``: proposes the order of a job's hosts on a described machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from unisono.algorithms.catalogue.registry import find
from unisono.cli.commands.show import given_parameters
from unisono.cli.commands.simulate import megabytes_by_level, simulation_to_json
from unisono.cli.options.completion import algorithms as complete_algorithms, collectives as complete_collectives
from unisono.cli.options.loading import load_option
from unisono.cli.options.sizes import nbytes_moved, nbytes_option
from unisono.cli.output.terminal import console
from unisono.errors import UsageError
from unisono.tuning.decide.place_order import MOST_PLACES, PlaceOrder, best_place_order
from unisono.tuning.machine.topology_files import load


def _places(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, ...]:
    """Return the numbers in a list of numbers and ranges, in its order; none if there is no list."""
    if text is None:
        return ()
    places = list[int]()
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not (first.isascii() and first.isdigit() and (not dash or (last.isascii() and last.isdigit()))):
            raise click.BadParameter(f"{part!r} is neither a number of a place nor a range such as 0-7.")
        if dash and int(last) < int(first):
            raise click.BadParameter(f"the range {part!r} ends before it begins.")
        run = range(int(first), int(last or first) + 1)
        if len(places) + len(run) > MOST_PLACES:
            raise click.BadParameter(f"{text!r} has more than {MOST_PLACES} places.")
        places += run
    return tuple(places)


@click.command(short_help="Propose the order of a job's hosts on a described machine.")
@click.argument("collective", shell_complete=complete_collectives)
@click.argument("algorithm", shell_complete=complete_algorithms)
@click.option(
    "--topology",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="File that describes the machine.",
)
@click.option(
    "--places",
    callback=_places,
    help="Numbers of the job's hosts on the machine, in their present order: 0-3,32-35. Of ranks, if it has one level. "
    "By default those in a measured file.",
)
@click.option("--names", metavar="NAME,…", help="Names of the same hosts, in the same order, which are then printed.")
@nbytes_option
@click.option("--root", type=int, default=0, show_default=True, help="Root of the collective.")
@click.option("--param", "params", multiple=True, metavar="NAME=VALUE", help="Parameter of the algorithm: radix=4.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
@load_option
def command(
    collective: str,
    algorithm: str,
    topology: Path,
    places: tuple[int, ...],
    names: str | None,
    nbytes: int,
    root: int,
    params: tuple[str, ...],
    as_json: bool,
) -> None:
    """Propose the order of a job's hosts in which ALGORITHM takes the least time for COLLECTIVE.

    Launchers number ranks in the order of the hosts: pass the proposed order to yours.

    For example: unisono place allreduce ring --topology machine.toml --places 0,32,1,33 --size 64M
    """
    machine = load(topology)
    places = places or machine.places
    if not places:
        raise UsageError("the topology does not say where the hosts of the job are: pass --places")
    of_place, length = _names_of(places, names), nbytes_moved(collective, nbytes)
    chosen = find(collective, algorithm)
    with console(stderr=True).status(f"searching an order of {len(places)} places"):
        arguments = given_parameters(chosen, params)
        proposal = best_place_order(chosen, length, machine, places, root=root, params=arguments)
    order = [of_place[place] for place in proposal.places]
    if as_json:
        click.echo(json.dumps(_json(proposal, order)))
        return
    terminal = console()
    terminal.print(_table(proposal))
    if proposal.simulation is proposal.present:
        terminal.print("No order is faster by 2 %: keep the present one.")
        return
    terminal.print(",".join(order), soft_wrap=True, highlight=False)


def _names_of(places: Sequence[int], names: str | None) -> dict[int, str]:
    """Return the name of each place: its number, if there are no names."""
    of_places = [name.strip() for name in names.split(",")] if names else [str(place) for place in places]
    if len(of_places) != len(places):
        raise UsageError(f"there are {len(of_places)} names and {len(places)} places: pass a name for each place")
    return dict(zip(places, of_places, strict=True))


def _json(proposal: PlaceOrder, order: Sequence[str]) -> dict[str, Any]:
    return {
        "places": proposal.places,
        "order": order,
        "ranks_at_place": proposal.ranks_at_place,
        "proposed": simulation_to_json(proposal.simulation),
        "present": simulation_to_json(proposal.present),
    }


def _table(proposal: PlaceOrder) -> Table:
    after, before = proposal.simulation, proposal.present
    table = Table(title=f"{after.collective} {after.algorithm}, {after.nbytes:,} B, {after.size:,} ranks")
    table.add_column("order")
    for heading in ("µs", *(f"MB by {level.name}" for level in after.levels)):
        table.add_column(heading, justify="right")
    table.add_column("busiest")
    rows = [("present", before)] if after is before else [("present", before), ("proposed", after)]
    for name, row in rows:
        table.add_row(name, f"{row.seconds * 1e6:,.1f}", *megabytes_by_level(row), row.busiest[0])
    return table
