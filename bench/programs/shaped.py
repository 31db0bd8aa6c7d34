"""Measures a collective between hosts on slow links: network namespaces of this machine, shaped by the kernel.

    sudo unisono bench shaped --hosts 4 --rate 1gbit --collective allgather

The hosts are those of `bench.namespaces`. In each round, rank 0 streams as many bytes over one TCP socket to another
host as some host must send or receive with any algorithm (`BOUNDS`), so that time is the bound. Then every algorithm
runs once. Before each, all links are idle until the kernel's token buckets are full.

All namespaces are removed at the end, also after Ctrl-C. The next run removes those of a killed run.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from unisono.bench.namespaces import address, network, run_ranks
from unisono.bench.sizes import parse_sizes
from unisono.bench.variants import variants_in
from unisono.errors import UsageError
from unisono.foundation.program import begin

RANK = Path(__file__).resolve().parent / "ranks" / "shaped_rank.py"
_AGAIN_S = 1.0
# For each collective: the bytes that some host must send or receive, by the bytes of a rank's longer buffer, the number
# of hosts and the ranks of each.
BOUNDS: dict[str, Callable[[int, int, int], float]] = {
    "allreduce": lambda nbytes, hosts, _: 2 * (hosts - 1) / hosts * nbytes,
    "reduce_scatter": lambda nbytes, hosts, _: (hosts - 1) / hosts * nbytes,
    "allgather": lambda nbytes, hosts, _: (hosts - 1) / hosts * nbytes,
    "alltoall": lambda nbytes, hosts, per_host: per_host * (hosts - 1) / hosts * nbytes,
    "broadcast": lambda nbytes, _, __: nbytes,
}
# The algorithm that is measured beside the tuner's choice unless the user names others: "ring" where there is one.
BESIDE = {"alltoall": "pairwise", "broadcast": "scatter_ring"}


@dataclass(frozen=True, slots=True)
class AlgorithmTimes:
    """The times of one algorithm.

    Attributes:
        algorithm: its name, or "auto" for the tuner's choice.
        median_ms, best_ms: of a call, the maximum over ranks.
        bound_ms: median over rounds of the byte stream's time, which no algorithm can beat.
        efficiency: median over rounds of bound / time.
    """

    algorithm: str
    median_ms: float
    best_ms: float
    bound_ms: float
    efficiency: float


def _calm_down() -> None:
    """Stop the timer that `_end` has started."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def run(hosts: Sequence[str], per_host: int, arguments: Sequence[str]) -> list[list[float]]:
    """Run the ranks and return the times in rank 0's report: for each round, the stream and the algorithms.

    Raises:
        UsageError: a rank failed; its output says why.
    """
    report = run_ranks(hosts, per_host, [sys.executable, str(RANK), *arguments], before_killing=_calm_down)
    if not report:
        raise UsageError("a rank failed: its output above says why")
    times: list[list[float]] = json.loads(report)
    return times


def judge(times: list[list[float]], algorithms: Sequence[str]) -> list[AlgorithmTimes]:
    """Return the times of each algorithm, and its bound: the time in which the stream sent its bytes."""
    bounds = [row[0] for row in times]
    rows = []
    for k, algorithm in enumerate(algorithms):
        calls = [row[k + 1] for row in times]
        efficiency = statistics.median(bound / call for bound, call in zip(bounds, calls, strict=True))
        in_ms = (1e3 * statistics.median(calls), 1e3 * min(calls), 1e3 * statistics.median(bounds))
        rows.append(AlgorithmTimes(algorithm, *in_ms, efficiency))
    return rows


def show(title: str, rows: Sequence[AlgorithmTimes]) -> None:
    """Print the table of times and bounds."""
    table = Table("algorithm", title=title)
    for heading in ("median ms", "best ms", "bound ms", "of the bound"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.algorithm,
            f"{row.median_ms:,.1f}",
            f"{row.best_ms:,.1f}",
            f"{row.bound_ms:,.1f}",
            f"{100 * row.efficiency:.1f} %",
        )
    Console().print(table)


def _end(number: int, frame: Any) -> None:
    # The timer raises again, because Python ignores an exception in some places, such as the end of an object.
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    raise KeyboardInterrupt


@click.command()
@click.option("--hosts", type=click.IntRange(min=2, max=200), default=4, show_default=True, help="Namespaces.")
@click.option("--per-host", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks in each.")
@click.option("--rate", default="1gbit", show_default=True, help="Rate of each host's link, in the notation of tc.")
@click.option("--collective", type=click.Choice(list(BOUNDS)), default="allreduce", show_default=True)
@click.option("--size", default="64M", show_default=True, help="Bytes of a rank's longer buffer.")
@click.option("--algorithms", help="Names, with commas between.  [default: auto, and ring or one like it]")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Calls of each algorithm.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="File to append results to.")
def main(hosts: int, per_host: int, rate: str, output: Path | None, **call: Any) -> None:
    """Measure a collective between hosts on links of a given rate. Needs root, `ip` and `tc`."""
    if os.geteuid() != 0:
        raise click.UsageError("network namespaces need root")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, _end)
    collective, rounds = call["collective"], call["rounds"]
    names = variants_in(call["algorithms"] or f"auto,{BESIDE.get(collective, 'ring')}", collective)
    (nbytes,) = parse_sizes(call["size"])
    streamed = int(BOUNDS[collective](nbytes, hosts, per_host))
    arguments = [address(0), str(per_host), collective, str(nbytes), str(streamed), str(rounds), *names]
    try:
        with network(hosts, rate, before_removal=_calm_down) as namespaces:
            times = run(namespaces, per_host, arguments)
    except UsageError as error:
        raise click.ClickException(str(error)) from None
    rows = judge(times, names)
    show(f"{collective} float32 {call['size']}, {hosts} hosts × {per_host} ranks, {rate}", rows)
    if output is not None:
        settings = {"hosts": hosts, "per_host": per_host, "rate": rate, "nbytes": nbytes, "rounds": rounds}
        shaped = {"collective": collective, **settings}
        document = {"shaped": shaped, "found": [asdict(row) for row in rows], "times_s": times}
        with output.open("a") as file:
            file.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    begin()
    main()
