"""New and old algorithms on networks whose links are shared, in the simulator.

    unisono bench contention [--scattered] [--json]

Each network has one rank for each node. A link carries one message at full bandwidth, or as many as its level says, and
more messages share it. Combining costs nothing, so only the network counts. A number is the time of the fastest of the
older algorithms divided by the time of the algorithm: above 1, the algorithm is faster.

With ``--scattered``, the ranks stand at random nodes of machines of 256 nodes, in the order of the nodes, as in a job
of a batch system. The results are medians of 20 such jobs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from unisono.algorithms.catalogue.registry import find
from unisono.bench.sizes import format_size
from unisono.foundation.program import begin
from unisono.tuning.machine.parameters import Link
from unisono.tuning.machine.placed_topology import PlacedTopology
from unisono.tuning.machine.topology import Level, Topology
from unisono.tuning.simulator.simulate import Simulation, simulate

SIZES = (1 << 10, 32 << 10, 1 << 20, 32 << 20)
RANKS = 64
NODES = 256
DRAWS = 20
_FREE = 1e-15  # seconds of combining a byte
_LINK = Link("link", 1e-6, 0.2e-6, 1 / 12.5e9, _FREE, pairs=1)
_HOP_S = 0.1e-6


class Contender(NamedTuple):
    """An algorithm with its parameters, and whether it is one of the older ones."""

    name: str
    params: Mapping[str, Any]
    is_old: bool = False

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.params.items())
        return f"{self.name}({given})" if given else self.name


def networks() -> dict[str, tuple[Topology, tuple[int, ...]]]:
    """Return the networks of 64 nodes by name, each with the lengths of its torus if it is one."""
    port = _LINK._replace(name="port")
    many = _LINK._replace(name="torus", ports=6)
    return {
        "ring of 64": (_torus((64,), many), (64,)),
        "torus 8 × 8": (_torus((8, 8), many), (8, 8)),
        "torus 4 × 4 × 4": (_torus((4, 4, 4), many), (4, 4, 4)),
        "fat tree": (Topology(RANKS, (Level("leaf", port, 8), Level("spine", _LINK._replace(pairs=8), 8))), ()),
        "fat tree, taper 4": (
            Topology(RANKS, (Level("leaf", port, 8), Level("spine", _LINK._replace(pairs=2), 8))),
            (),
        ),
        "dragonfly": (
            Topology(
                RANKS,
                (
                    Level("router", port, 4),
                    Level("group", _LINK, 4, "all_to_all"),
                    Level("global", _LINK, 4, "all_to_all"),
                ),
            ),
            (),
        ),
    }


def _torus(shape: tuple[int, ...], link: Link) -> Topology:
    size = prod(shape)
    return Topology(size, (Level("torus", link, size, "torus", shape, _HOP_S),))


def machines() -> dict[str, Topology]:
    """Return the machines of 256 nodes for scattered jobs, by name."""
    port = _LINK._replace(name="port")
    many = _LINK._replace(name="torus", ports=6)
    leaf = Level("leaf", port, 8)
    router, group = Level("router", port, 4), Level("group", _LINK, 4, "all_to_all")
    return {
        "ring of 256": _torus((256,), many),
        "torus 16 × 16": _torus((16, 16), many),
        "torus 8 × 8 × 4": _torus((8, 8, 4), many),
        "fat tree": Topology(NODES, (leaf, Level("spine", _LINK._replace(pairs=8), 32))),
        "fat tree, taper 4": Topology(NODES, (leaf, Level("spine", _LINK._replace(pairs=2), 32))),
        "dragonfly": Topology(NODES, (router, group, Level("global", _LINK, 16, "all_to_all"))),
    }


def contenders(collective: str, dims: tuple[int, ...]) -> list[Contender]:
    """Return the algorithms of a collective. On a torus, its lengths are passed to every algorithm that takes them."""
    on_torus: list[dict[str, Any]] = [{"dims": dims}, {"dims": dims, "lanes": 2 * len(dims)}] if dims else [{}]
    shaped = [Contender(name, params) for name in ("swing", "torus") for params in on_torus if dims or name == "swing"]
    if collective == "allreduce":
        old = ("ring", "recursive_doubling", "rabenseifner")
        short = on_torus[0]
        return [*_old(old), *shaped, Contender("swing_doubling", short), Contender("bine", {})]
    if collective == "allgather":
        return [*_old(("ring", "recursive_doubling", "bruck")), *shaped, Contender("bine", {}), Contender("pat", {})]
    return [*_old(("binomial",)), Contender("bine", {})]


def _old(names: Sequence[str]) -> list[Contender]:
    return [Contender(name, {}, True) for name in names]


class Row(NamedTuple):
    """One algorithm on one network: its seconds at each size, and its bytes over the outermost level, in vectors."""

    network: str
    collective: str
    contender: Contender
    seconds: tuple[float, ...]
    far: float


def rows(collectives: Sequence[str] = ("allreduce", "allgather", "broadcast")) -> list[Row]:
    """Simulate all algorithms on all networks."""
    results = []
    for network, (topology, dims) in networks().items():
        for collective in collectives:
            for contender in contenders(collective, dims):
                runs = [_run(collective, contender, nbytes, topology) for nbytes in SIZES]
                far = runs[-1].levels[-1].nbytes / SIZES[-1]
                results.append(Row(network, collective, contender, tuple(run.seconds for run in runs), far))
    return results


def _run(collective: str, contender: Contender, nbytes: int, topology: Topology) -> Simulation:
    return simulate(find(collective, contender.name), nbytes, topology, params=contender.params)


def scattered_rows(nbytes: int = 1 << 20) -> list[Row]:
    """Simulate jobs at random nodes, at one size: medians of their seconds and bytes, by machine and algorithm."""
    jobs = [np.sort(np.random.default_rng(seed).choice(NODES, RANKS, replace=False)) for seed in range(DRAWS)]
    results = []
    for machine, topology in machines().items():
        placed = [PlacedTopology(topology, places[np.newaxis]) for places in jobs]
        for collective in ("allreduce", "allgather", "broadcast"):
            for contender in contenders(collective, ()):
                runs = [_run(collective, contender, nbytes, each) for each in placed]
                far = statistics.median(run.levels[-1].nbytes / nbytes for run in runs)
                seconds = statistics.median(run.seconds for run in runs)
                results.append(Row(machine, collective, contender, (seconds,), far))
    return results


def gains(row: Row, of: Sequence[Row]) -> list[float]:
    """Return, for each size, the time of the fastest older algorithm on the network divided by the time of `row`."""
    old = [each for each in of if each[:2] == row[:2] and each.contender.is_old]
    return [min(each.seconds[at] for each in old) / row.seconds[at] for at in range(len(row.seconds))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, and show a table for each network."""
    begin()
    parser = argparse.ArgumentParser(prog="unisono bench contention", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    parser.add_argument("--scattered", action="store_true", help="jobs at random nodes, at 1 MiB")
    options = parser.parse_args(arguments)
    results, sizes = (scattered_rows(), (1 << 20,)) if options.scattered else (rows(), SIZES)
    if options.json:
        listed = [{**row._asdict(), "contender": str(row.contender), "gains": gains(row, results)} for row in results]
        sys.stdout.write(f"{json.dumps(listed, indent=1)}\n")
        return 0
    console = Console() if sys.stdout.isatty() else Console(width=120)
    table = Table()
    for heading in ("network", "collective", "algorithm", *map(format_size, sizes), "far bytes"):
        table.add_column(heading)
    for row in results:
        numbers = [f"{gain:.2f}" for gain in gains(row, results)]
        table.add_row(row.network, row.collective, str(row.contender), *numbers, f"{row.far:.2f}·n")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
