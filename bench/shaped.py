"""Allreduce between hosts on slow links: network namespaces of this machine, shaped by the kernel.

    sudo python -m unisono.bench.shaped --hosts 4 --rate 1gbit

The hosts are those of `bench.namespaces`. In each round rank 0 streams bare bytes over one TCP socket to another host,
which gives the link's payload rate B, and then every algorithm runs once. The bound of an allreduce of n bytes over h
hosts is 2(h − 1)/h · n/B: so much must every host send, whatever the algorithm.

Everything is removed in the end, on Ctrl-C too; what a killed run has left is removed by the next one.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from unisono.bench.namespaces import address, network, run_ranks
from unisono.bench.sizes import parse_sizes
from unisono.errors import UsageError
from unisono.program import begin

RANK = Path(__file__).resolve().parent / "adapters" / "shaped_rank.py"
_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Found:
    """What an algorithm took.

    Attributes:
        algorithm: its name, or "auto" for the tuner's choice.
        median_ms, best_ms: of a call, the maximum over ranks.
        bound_ms: median over the rounds of the time that no algorithm can beat, by that round's bare stream.
        efficiency: median over the rounds of bound / time.
    """

    algorithm: str
    median_ms: float
    best_ms: float
    bound_ms: float
    efficiency: float


def _calm_down() -> None:
    """End what `_end` has begun."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def run(hosts: Sequence[str], per_host: int, arguments: Sequence[str]) -> list[list[float]]:
    """Run the ranks and return the times of rank 0's report: by round, the stream and the algorithms.

    Raises:
        UsageError: a rank failed; it has said why.
    """
    report = run_ranks(hosts, per_host, [sys.executable, str(RANK), *arguments], before_killing=_calm_down)
    if not report:
        raise UsageError("the ranks failed")
    times: list[list[float]] = json.loads(report)
    return times


def judge(times: list[list[float]], hosts: int, algorithms: Sequence[str]) -> list[Found]:
    """Return what each algorithm took, beside its bound."""
    bounds = [2 * (hosts - 1) / hosts * row[0] for row in times]
    found = []
    for k, algorithm in enumerate(algorithms):
        calls = [row[k + 1] for row in times]
        efficiency = statistics.median(bound / call for bound, call in zip(bounds, calls, strict=True))
        in_ms = (1e3 * statistics.median(calls), 1e3 * min(calls), 1e3 * statistics.median(bounds))
        found.append(Found(algorithm, *in_ms, efficiency))
    return found


def show(title: str, found: Sequence[Found]) -> None:
    """Print the table."""
    table = Table("algorithm", title=title)
    for heading in ("median ms", "best ms", "bound ms", "of the bound"):
        table.add_column(heading, justify="right")
    for row in found:
        table.add_row(
            row.algorithm,
            f"{row.median_ms:,.1f}",
            f"{row.best_ms:,.1f}",
            f"{row.bound_ms:,.1f}",
            f"{100 * row.efficiency:.1f} %",
        )
    Console().print(table)


def _end(number: int, frame: Any) -> None:
    # Once more, if this comes where Python can only ignore an exception, as in the end of an object.
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    raise KeyboardInterrupt


@click.command()
@click.option("--hosts", type=click.IntRange(min=2, max=200), default=4, show_default=True, help="Namespaces.")
@click.option("--per-host", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks in each.")
@click.option("--rate", default="1gbit", show_default=True, help="Of each host's link, as tc takes it.")
@click.option("--size", default="64M", show_default=True, help="Bytes of one rank's buffer.")
@click.option("--algorithms", default="auto,ring", show_default=True, help="With commas between.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Of each.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Append the results here.")
def main(hosts: int, per_host: int, rate: str, size: str, algorithms: str, rounds: int, output: Path | None) -> None:
    """Measure allreduce between hosts on links of a given rate. Needs root, `ip` and `tc`."""
    if os.geteuid() != 0:
        raise click.UsageError("network namespaces need root")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, _end)
    (nbytes,) = parse_sizes(size)
    names = algorithms.split(",")
    arguments = [address(0), str(per_host), str(nbytes), str(rounds), *names]
    try:
        with network(hosts, rate, before_removal=_calm_down) as namespaces:
            times = run(namespaces, per_host, arguments)
    except UsageError as error:
        raise click.ClickException(str(error)) from None
    found = judge(times, hosts, names)
    show(f"allreduce float32 {size}, {hosts} hosts × {per_host} ranks, {rate}", found)
    if output is not None:
        asked = {"hosts": hosts, "per_host": per_host, "rate": rate, "nbytes": nbytes, "rounds": rounds}
        document = {"shaped": asked, "found": [asdict(row) for row in found], "times_s": times}
        with output.open("a") as file:
            file.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    begin()
    main()
