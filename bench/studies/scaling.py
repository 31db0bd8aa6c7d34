"""Published scaling studies, repeated by the simulator: published results, assumptions, and simulated results.

    unisono bench scaling [--json]

Nothing is fitted to the published numbers: links have round numbers of the order of the hardware's. Unknown values,
above all how much the steps of ranks differ, vary over the rows. The studies can show how large each effect is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from unisono.algorithms.catalogue.registry import find
from unisono.foundation.program import begin
from unisono.tuning.machine.parameters import Link
from unisono.tuning.machine.topology import Level, Topology
from unisono.tuning.simulator.simulate import Simulation, simulate
from unisono.tuning.simulator.training import TrainingForecast, simulate_training

SPREADS = (0.0, 0.02, 0.04, 0.06)

# Cray Aries: nodes on routers, all to all in groups and between them.
ARIES = (
    Level("router", Link("router", 1.3e-6, 0.5e-6, 1 / 8e9, 1 / 8e9), 4),
    Level("group", Link("group", 1.6e-6, 0.5e-6, 1 / 8e9, pairs=2), 96, "all_to_all"),
    Level("system", Link("system", 2.2e-6, 0.5e-6, 1 / 8e9, pairs=30), 34, "all_to_all"),
)
# Six V100 on NVLink in a node, and two cards of 100 Gbit/s that they share, in a fat tree.
SUMMIT = (
    Level("node", Link("NVLink", 4e-6, 2e-6, 1 / 40e9, 1 / 300e9), 6),
    Level("network", Link("EDR", 3e-6, 2e-6, 1 / 11e9, 1 / 300e9, pairs=2)),
)
# Sixteen GPUs on PCIe in a node with one card of 56 Gbit/s.
KESCH = (
    Level("node", Link("PCIe", 8e-6, 4e-6, 1 / 9e9, 1 / 100e9), 16),
    Level("network", Link("FDR", 5e-6, 4e-6, 1 / 5.5e9, 1 / 100e9, pairs=1)),
)


class Study(NamedTuple):
    """A study: its published result, our assumptions, and a function that simulates rows of (label, result)."""

    name: str
    published: str
    assumed: str
    replay: Callable[[], list[tuple[str, str]]]


def cosmoflow() -> list[tuple[str, str]]:
    """Return the efficiency at 8,192 nodes for several spreads of step times, with and without overlap."""
    reduced = _of("allreduce", "rabenseifner", 28e6, Topology(8192, ARIES))
    rows = [("allreduce of 28 MB", f"{reduced.seconds * 1e3:.1f} ms")]
    for spread in SPREADS:
        training = TrainingForecast(0.130, (reduced.seconds / 4,) * 4, spread=spread)
        rows.append((f"efficiency, spread {spread:.0%}", _both(training, 8192)))
    return rows


def hep() -> list[tuple[str, str]]:
    """Return the efficiency at 1,000 nodes, with gradients on time and one step late."""
    reduced = _of("allreduce", "circulant", 2.4e6, Topology(1000, ARIES))
    rows = [("allreduce of 2.4 MB", f"{reduced.seconds * 1e3:.2f} ms")]
    for spread in SPREADS:
        training = TrainingForecast(0.050, (reduced.seconds,), spread=spread, overlap=False)
        by_lag = [simulate_training(training._replace(lag=lag), 1000, 200).efficiency for lag in (0, 1)]
        rows.append((f"efficiency, spread {spread:.0%}", f"lag 0: {by_lag[0]:.1%}, lag 1: {by_lag[1]:.1%}"))
    return rows


def caffe() -> list[tuple[str, str]]:
    """Return the simulated time of a flat reduce, and of hierarchical ones."""
    topology = Topology(160, KESCH)
    rows = []
    flat = _of("reduce", "binomial", 256e6, topology)
    ways: dict[str, dict[str, Any]] = {
        "binomial trees inside and across": {},
        "chains inside, a tree across, 32 segments": {"segments": 32, "reduce": "chain"},
        "chains inside and across, 32 segments": {"segments": 32, "reduce": "chain", "across": "chain"},
    }
    rows.append(("flat binomial tree", f"{flat.seconds * 1e3:.0f} ms"))
    for name, how in ways.items():
        segments = how.pop("segments", 1)
        simulation = _of("reduce", "hierarchical", 256e6, topology, segments, hosts=topology.hosts(), **how)
        rows.append((name, f"{simulation.seconds * 1e3:.0f} ms, {flat.seconds / simulation.seconds:.1f} times as fast"))
    return rows


def climate() -> list[tuple[str, str]]:
    """Return the efficiency at 27,360 GPUs, with a flat ring and with a hierarchical allreduce."""
    topology = Topology(27_360, SUMMIT)
    rows = []
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "flat ring": ("ring", {}),
        "hierarchical (rings)": ("full_lane", {"hosts": topology.hosts(), "across": "ring"}),
    }
    for name, (algorithm, params) in ways.items():
        reduced = _of("allreduce", algorithm, 175e6, topology, **params)
        rows.append((f"{name}: allreduce of 175 MB", f"{reduced.seconds * 1e3:.1f} ms"))
        for lag in (0, 1):
            training = TrainingForecast(1.1, (reduced.seconds / 8,) * 8, spread=0.02, lag=lag)
            rows.append((f"{name}: efficiency, spread 2%, lag {lag}", _both(training, 27_360)))
    return rows


STUDIES = (
    Study(
        "CosmoFlow on 8,192 nodes (SC18, arXiv 1808.04728)",
        "77 % parallel efficiency, fully synchronous",
        "130 ms a step, 28 MB of gradients, 8 GB/s a node, dragonfly, Rabenseifner's allreduce, 4 buckets",
        cosmoflow,
    ),
    Study(
        "HEP-CNN on 1,000 nodes (of the kind of arXiv 1708.05256)",
        "delayed gradients hide what is waited for; no number of them is replayed",
        "50 ms a step, 2.4 MB of gradients, 8 GB/s a node, dragonfly, circulant allreduce, no overlap",
        hep,
    ),
    Study(
        "S-Caffe's reduce on 160 GPUs (PPoPP'17)",
        "hierarchical 2.6 times as fast as MVAPICH2 and 133 times as fast as Open MPI, at best",
        "256 MB, 10 nodes of 16 GPUs, 9 GB/s inside and 5.5 GB/s out of a node; no staging through hosts",
        caffe,
    ),
    Study(
        "Climate segmentation on 27,360 GPUs (SC18, arXiv 1810.01993)",
        "90.7 % parallel efficiency in single precision, hierarchical allreduce, gradients one step late",
        "1.1 s a step, 175 MB of gradients, NVLink of 40 GB/s, 22 GB/s out of a node of 6 GPUs, 8 buckets",
        climate,
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate the studies, and show them."""
    parser = argparse.ArgumentParser(prog="unisono bench scaling", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    options = parser.parse_args(arguments)
    results = []
    with Console(stderr=True).status("") as status:
        for study in STUDIES:
            status.update(study.name)
            results.append((study, study.replay()))
    if options.json:
        rows = [{**study._asdict(), "replay": dict(replay)} for study, replay in results]
        sys.stdout.write(f"{json.dumps(rows, indent=2)}\n")
        return 0
    console = Console() if sys.stdout.isatty() else Console(width=120)
    for study, replay in results:
        table = Table(title=study.name, caption=f"published: {study.published}\nassumed: {study.assumed}")
        table.add_column("simulated")
        table.add_column("")
        for row in replay:
            table.add_row(*row)
        console.print(table)
    return 0


def _of(collective: str, algorithm: str, nbytes: float, over: Topology, segments: int = 1, **params: Any) -> Simulation:
    return simulate(find(collective, algorithm), nbytes, over, segments=segments, params=params)


def _both(training: TrainingForecast, size: int) -> str:
    apart, together = (
        simulate_training(training._replace(overlap=overlap), size).efficiency for overlap in (False, True)
    )
    return f"{apart:.1%} without overlap, {together:.1%} with it"


if __name__ == "__main__":
    begin()
    sys.exit(main())
