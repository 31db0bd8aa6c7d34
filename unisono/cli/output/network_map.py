"""The map of a network for people: its hosts, delays, rates and regions, and the ways that a call uses."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from unisono.algorithms.catalogue.registry import find
from unisono.algorithms.composition.rank_order import build_in_order
from unisono.algorithms.ir.plan import Send
from unisono.tuning.decide.choice import Explanation
from unisono.tuning.machine.network_map import NetworkMap

_INCHES, _RADIUS = 7.0, 1.0


class ExplainedMap(NamedTuple):
    """A network with the ways that a call uses.

    Attributes:
        network: the map.
        order: the hosts in the order of the call; the usual order if it has no other.
        used: the (from, to) of all ways that carry a message of the call.
    """

    network: NetworkMap
    order: tuple[int, ...]
    used: AbstractSet[tuple[int, int]]

    def as_json(self) -> dict[str, Any]:
        """Return the map for machines."""
        return {
            **self.network._asdict(),
            "regions": self.network.regions(),
            "order": self.order,
            "used": sorted(self.used),
        }


def explained_map(explanation: Explanation, network: NetworkMap) -> ExplainedMap:
    """Return a network with the ways that the chosen algorithm uses."""
    question, choice = explanation.question, explanation.choice
    host_of = {rank: host for host, ranks in enumerate(question.hosts) for rank in ranks}
    build, params = find(question.collective, choice.algorithm).build, dict(choice.params)
    used = {
        (host_of[rank], host_of[step.peer])
        for rank in range(question.size)
        for plan in [build_in_order(build, question.size, rank, question.root, **params)]
        for lane in range(len(plan.lanes))
        for group in plan.groups(lane)
        for step in group.steps
        if isinstance(step, Send) and host_of[rank] != host_of[step.peer]
    }
    order = tuple(dict.fromkeys(host_of[rank] for rank in params.get("order", range(question.size))))
    return ExplainedMap(network, order, used)


def map_table(shown: ExplainedMap) -> Table:
    """Return a table of all ways: a row for each host that sends, and a column for each that receives."""
    network = shown.network
    table = Table(title="delay in ms / rate in Mbit/s of each way; * carries messages of this call")
    region_of = {host: number for number, region in enumerate(network.regions()) for host in region}
    table.add_column("from")
    table.add_column("region", justify="right")
    for host in range(network.hosts):
        table.add_column(f"to {host}", justify="right")
    for i in range(network.hosts):
        cells = ["" if i == j else _way(network, i, j) + " *" * ((i, j) in shown.used) for j in range(network.hosts)]
        table.add_row(f"host {i}", str(region_of[i]), *cells)
    return table


def order_text(shown: ExplainedMap) -> str:
    """Return a line about the order of hosts and the regions."""
    regions = " | ".join(" ".join(map(str, region)) for region in shown.network.regions())
    return f"order of hosts: {' '.join(map(str, shown.order))}; regions: {regions}"


def draw_map(path: Path, title: str, shown: ExplainedMap) -> None:
    """Draw the hosts around a circle, region by region, with all ways, and the used ones as arrows."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrowPatch

    from unisono.cli.output.schedule_picture import COLOURS

    network = shown.network
    figure = Figure(figsize=(_INCHES, _INCHES), layout="constrained")
    figure.patch.set_alpha(0.0)
    axes = figure.subplots()
    axes.set_title(title, fontsize=10)
    axes.set(xlim=(-1.35, 1.35), ylim=(-1.35, 1.35), aspect="equal")
    axes.set_axis_off()
    around = [host for region in network.regions() for host in region]
    angles = {host: 2 * np.pi * at / network.hosts for at, host in enumerate(around)}
    places = {host: (_RADIUS * float(np.sin(angle)), _RADIUS * float(np.cos(angle))) for host, angle in angles.items()}
    fastest_s = min(network.per_byte_s[i][j] for i, j in network.pairs)
    for i, j in network.pairs:
        is_used = (i, j) in shown.used
        axes.add_patch(
            FancyArrowPatch(
                places[i],
                places[j],
                arrowstyle="-|>" if is_used else "-",
                connectionstyle="arc3,rad=0.12",
                mutation_scale=12,
                linewidth=0.4 + 2.2 * fastest_s / network.per_byte_s[i][j],
                color=COLOURS[1] if is_used else "#888888",
                alpha=1.0 if is_used else 0.35,
                shrinkA=14,
                shrinkB=14,
                zorder=2 if is_used else 1,
            )
        )
        if is_used and len(shown.used) <= 2 * network.hosts:
            x, y = ((2 * a + b) / 3 for a, b in zip(places[i], places[j], strict=True))
            axes.text(x, y, _way(network, i, j), fontsize=7, ha="center", zorder=4)
    for number, region in enumerate(network.regions()):
        for host in region:
            colour = COLOURS[(0, 2, 3, 4, 5)[number % 5]]
            axes.plot(*places[host], marker="o", markersize=22, color=colour, zorder=3)
            axes.text(*places[host], str(host), color="white", ha="center", va="center", weight="bold", zorder=4)
    figure.supxlabel("number: host · colour: region · width: rate · arrow: delay in ms / rate in Mbit/s", fontsize=8)
    figure.savefig(path, format="svg")


def _way(network: NetworkMap, source: int, target: int) -> str:
    return f"{1e3 * network.delay_s[source][target]:.0f} / {8e-6 / network.per_byte_s[source][target]:.0f}"
