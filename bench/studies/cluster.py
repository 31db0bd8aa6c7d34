"""Compares collectives that were measured on a real cluster with the simulator, on a description made from the data.

    unisono bench cluster --data leonardo_collectives.csv [--json]

The data has the columns of `selection.py`. One description is made for each job in which a ring allgather was measured:
a round of the ring takes the time of the call divided by the number of rounds, which gives the field `step` of one
level, by the bytes of a block. If the job has a linear scatter, its shortest call gives the field `other_peer_s`,
because its root sends each message to another rank: the time divided by the number of messages. Nothing else comes from
the data, and no other collective is used. Combining is taken to cost `REDUCE_PER_BYTE_S`. The other collectives of the
same job are then simulated.

Jobs are not compared with each other, because the same point differs by a factor of 3 between them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from unisono.algorithms.catalogue.registry import find
from unisono.bench.sizes import format_size
from unisono.bench.studies.selection import Measurement, geomean, measurements
from unisono.errors import UsageError
from unisono.foundation.program import begin
from unisono.tuning.machine.parameters import Link, curve
from unisono.tuning.machine.topology import Level
from unisono.tuning.machine.topology_files import Description
from unisono.tuning.simulator.simulate import simulate

# A core combines about 5 GB/s of numbers that are not in its caches.
REDUCE_PER_BYTE_S = 2e-10
SOURCE = ("allgather", "ring_ompi")
OTHER_PEERS = ("scatter", "linear_ompi")
# By collective and algorithm of Open MPI, the algorithm of Unisono with the same messages.
SAME = {
    ("allreduce", "ring_ompi"): "ring",
    ("allreduce", "rabenseifner_ompi"): "rabenseifner",
    ("allreduce", "recursive_doubling_ompi"): "recursive_doubling",
    ("allgather", "neighbor_ompi"): "neighbour_exchange",
    ("allgather", "recursive_doubling_ompi"): "recursive_doubling",
    ("reduce", "binomial_ompi"): "binomial",
    ("broadcast", "binomial_ompi"): "binomial",
    ("alltoall", "pairwise_ompi"): "pairwise",
    ("alltoall", "linear_ompi"): "direct",
    ("alltoall", "modified_bruck_ompi"): "bruck",
}


class Comparison(NamedTuple):
    """A call that was measured and simulated: its job, collective, the library's algorithm, ranks, bytes and times."""

    job: str
    collective: str
    algorithm: str
    size: int
    nbytes: int
    measured_s: float
    simulated_s: float

    @property
    def ratio(self) -> float:
        """The simulated time divided by the measured one."""
        return self.simulated_s / self.measured_s


def descriptions(rows: Sequence[Measurement]) -> dict[tuple[str, int], Description]:
    """Return a description for each job and number of ranks with a ring allgather on hosts of one rank each."""
    rounds = _per_message(rows, SOURCE)
    scattered = _per_message(rows, OTHER_PEERS)
    return {
        key: _description(f"{key[0]}, {key[1]} hosts", of_key, min(scattered.get(key, ((0, 0.0),)))[1])
        for key, of_key in rounds.items()
    }


def _per_message(
    rows: Iterable[Measurement], source: tuple[str, str]
) -> Mapping[tuple[str, int], Sequence[tuple[int, float]]]:
    """Return, by job and ranks, the bytes of a block and the seconds of each of the messages that a rank sends."""
    messages: defaultdict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
    for (job, _), point, _, algorithm, seconds in rows:
        if (point.collective, algorithm) == source and point.per_host == 1 and point.nbytes >= point.size > 1:
            messages[job, point.size].append((point.nbytes // point.size, seconds / (point.size - 1)))
    return messages


def _description(name: str, rounds: Sequence[tuple[int, float]], other_peer_s: float) -> Description:
    step = curve(rounds)
    per_byte_s = step.seconds[-1] / step.nbytes[-1]
    link = Link("network", step.seconds[0], 0.0, per_byte_s, REDUCE_PER_BYTE_S, step=step, other_peer_s=other_peer_s)
    return Description(name, (Level("network", link),))


def comparisons(rows: Sequence[Measurement]) -> list[Comparison]:
    """Return the calls of `SAME` that were measured in a job with a description."""
    machines = descriptions(rows)
    compared = list[Comparison]()
    for (job, _), point, _, algorithm, seconds in rows:
        own, machine = SAME.get((point.collective, algorithm)), machines.get((job, point.size))
        if own is not None and machine is not None and point.per_host == 1:
            simulated = simulate(find(point.collective, own), point.nbytes, machine.over(point.size))
            fields = (job, point.collective, algorithm, point.size, point.nbytes, seconds, simulated.seconds)
            compared.append(Comparison(*fields))
    return compared


def table(compared: Sequence[Comparison]) -> Table:
    """Return the ratios, a row for each algorithm in each job, and a column for each size."""
    sizes = sorted({each.nbytes for each in compared})
    by_row: defaultdict[tuple[str, str, int, str], dict[int, float]] = defaultdict(dict)
    for each in compared:
        by_row[each.collective, each.algorithm, each.size, each.job][each.nbytes] = each.ratio
    shown = Table(title="simulated ÷ measured time, by bytes of the vector")
    for heading in ("collective", "algorithm", "ranks", *map(format_size, sizes)):
        shown.add_column(heading, justify="left" if heading in ("collective", "algorithm") else "right")
    for (collective, algorithm, size, _), ratios in sorted(by_row.items()):
        cells = [f"{ratios[nbytes]:.2f}" if nbytes in ratios else "" for nbytes in sizes]
        shown.add_row(collective, algorithm, str(size), *cells)
    return shown


def summary(compared: Sequence[Comparison]) -> dict[str, Mapping[str, float]]:
    """Return, by collective and algorithm, the number of points, their mean ratio, and how many are near 1."""
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for each in compared:
        by_name[f"{each.collective} {each.algorithm}"].append(each.ratio)
    return {
        name: {
            "points": len(ratios),
            "geomean": geomean(ratios),
            "within_25_percent": float(np.mean([abs(ratio - 1) <= 0.25 for ratio in ratios])),
            "within_factor_2": float(np.mean([abs(math.log2(ratio)) <= 1 for ratio in ratios])),
        }
        for name, ratios in sorted(by_name.items())
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and show the ratios; exit code 2 if the data cannot be used."""
    parser = argparse.ArgumentParser(prog="unisono bench cluster", description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="CSV file of measurements")
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    options = parser.parse_args(arguments)
    try:
        compared = comparisons(list(measurements(options.data)))
    except UsageError as error:
        parser.error(str(error))
    if not compared:
        parser.error(f"{options.data} has no job with a ring allgather ({' '.join(SOURCE)}) beside another collective")
    if options.json:
        listed = [{**each._asdict(), "ratio": each.ratio} for each in compared]
        sys.stdout.write(f"{json.dumps({'comparisons': listed, 'summary': summary(compared)})}\n")
        return 0
    console = Console() if sys.stdout.isatty() else Console(width=220)
    console.print(table(compared))
    totals = Table("algorithm", "points", "geometric mean", "within 25 %", "within a factor of 2")
    for name, numbers in summary(compared).items():
        near = (f"{numbers[share]:.0%}" for share in ("within_25_percent", "within_factor_2"))
        totals.add_row(name, str(numbers["points"]), f"{numbers['geomean']:.2f}", *near)
    console.print(totals)
    return 0


if __name__ == "__main__":
    begin()
    sys.exit(main())
