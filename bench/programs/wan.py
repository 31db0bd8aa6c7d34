"""Measures allreduce across a wide-area network of network namespaces, or runs a program there.

    sudo unisono bench wan --preset two-continents --hosts 4
    sudo unisono bench wan --rate 200 --rtt 100 --loss 0.1 --hosts 2 --sizes 64M
    sudo unisono bench wan --preset home --hosts 3 -- python train.py

The network is that of `bench.wide_area`. No allreduce of n bytes among h hosts ends before its *bound*: all hosts
together send at least 2(h − 1)·n bytes of payload, and the last of them is under way for a delay.
"""

from __future__ import annotations

import json
import math
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from unisono.bench.namespaces import run_ranks
from unisono.bench.sizes import format_size, parse_sizes
from unisono.bench.variants import variants_in
from unisono.bench.wide_area import MOST_HOSTS, MTU, PRESETS, AccessLine, Area, NetworkWay, uniform, wide_area
from unisono.errors import UsageError
from unisono.foundation.program import begin

RANK = Path(__file__).resolve().parent / "ranks" / "wan_rank.py"
# Headers of IP and TCP with timestamps, in each packet.
_HEADERS_NBYTES = 52


@dataclass(frozen=True, slots=True)
class CallTimes:
    """The times of one algorithm at one size.

    Attributes:
        nbytes: of a rank's array.
        algorithm: the requested name, or "auto".
        chosen: the algorithm that ran.
        median_ms: of the last of the calls at once, from their common start to the end on the last rank.
        first_ms: the median for the first of them.
        bound_ms: the time that no algorithm can beat.
    """

    nbytes: int
    algorithm: str
    chosen: str
    median_ms: float
    first_ms: float
    bound_ms: float


def bound_s(area: Area, nbytes: int) -> float:
    """Return the seconds that no allreduce of `nbytes` can beat on an area without other traffic."""
    hosts = range(len(area.lines))
    pairs = [(i, j) for i in hosts for j in hosts if i != j]
    payload = (MTU - _HEADERS_NBYTES) / MTU * 1e6 / 8
    seconds = 0.0
    for end in (0, 1):  # the rates at which all hosts together send, and receive
        rates = [(line.up_mbit_s, line.down_mbit_s)[end] or math.inf for line in area.lines]
        of_ways = [sum(area.way(*pair).mbit_s or math.inf for pair in pairs if pair[end] == host) for host in hosts]
        total = sum(map(min, rates, of_ways))
        seconds = max(seconds, 2 * (len(hosts) - 1) * nbytes / (total * payload))
    return seconds + max(area.way(*pair).delay_ms for pair in pairs) / 1e3


def measured(area: Area, namespaces: Sequence[str], request: dict[str, Any]) -> list[CallTimes]:
    """Run the ranks, one on each host, and return their times.

    Raises:
        UsageError: a rank failed; its output says why.
    """
    report = run_ranks(namespaces, 1, [sys.executable, str(RANK), json.dumps(request)])
    if not report:
        raise UsageError("a rank failed: its output above says why")
    results = []
    for nbytes, algorithm, chosen, rounds in json.loads(report):
        last_ms, first_ms = (1e3 * statistics.median(pick(times) for times in rounds) for pick in (max, min))
        bound_ms = 1e3 * bound_s(area, nbytes * request["at_once"])
        results.append(CallTimes(nbytes, algorithm, chosen, last_ms, first_ms, bound_ms))
    return results


def _show(title: str, results: Sequence[CallTimes]) -> None:
    table = Table("size", "algorithm", "chosen", title=title)
    for heading in ("first ms", "last ms", "bound ms", "of the bound"):
        table.add_column(heading, justify="right")
    for row in results:
        times = [f"{each:,.1f}" for each in (row.first_ms, row.median_ms, row.bound_ms)]
        share = f"{100 * row.bound_ms / row.median_ms:.1f} %"
        table.add_row(format_size(row.nbytes), row.algorithm, row.chosen, *times, share)
    Console().print(table)


def _end(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


@click.command(context_settings={"ignore_unknown_options": False})
@click.option("--hosts", type=click.IntRange(2, MOST_HOSTS), default=4, show_default=True, help="Namespaces.")
@click.option("--preset", type=click.Choice([*PRESETS]), help="A kind of network, instead of the next four options.")
@click.option("--rate", type=click.FloatRange(0), default=200.0, show_default=True, help="Mbit/s of each host's line.")
@click.option("--rtt", type=click.FloatRange(0), default=100.0, show_default=True, help="Round trip in ms.")
@click.option("--jitter", type=click.FloatRange(0), default=0.0, show_default=True, help="Most of it, one way, in ms.")
@click.option("--loss", type=click.FloatRange(0, 100), default=0.0, show_default=True, help="Lost packets in per cent.")
@click.option("--sizes", default="8,64M", show_default=True, help="Bytes of one rank's array.")
@click.option("--algorithms", default="auto", show_default=True, help="Names, with commas between.")
@click.option("--at-once", type=click.IntRange(1), default=1, show_default=True, help="Calls that start together.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Calls of each algorithm.")
@click.option("--seed", type=int, default=0, show_default=True, help="Decides about losses and jitter.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="File to append results to.")
@click.option("--map", "map_file", type=click.Path(dir_okay=False), help="File for the map that the hosts measure.")
@click.argument("command", nargs=-1)
def main(
    hosts: int,
    preset: str | None,
    rate: float,
    rtt: float,
    jitter: float,
    loss: float,
    sizes: str,
    algorithms: str,
    at_once: int,
    rounds: int,
    seed: int,
    output: Path | None,
    map_file: str | None,
    command: tuple[str, ...],
) -> None:
    """Measure allreduce across a wide-area network, or run COMMAND as one rank on each of its hosts. Needs root."""
    way = NetworkWay(delay_ms=rtt / 2, jitter_ms=jitter, loss=loss / 100)
    area = PRESETS[preset](hosts) if preset else uniform(hosts, AccessLine(rate, rate), way)
    request = {
        "sizes": parse_sizes(sizes),
        "algorithms": variants_in(algorithms, "allreduce"),
        "rounds": rounds,
        "at_once": at_once,
        "map": map_file,
    }
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    try:
        with wide_area(area, seed) as network:
            if command:
                sys.stdout.buffer.write(run_ranks(network.namespaces, 1, command))
                return
            results = measured(area, network.namespaces, request)
    except UsageError as error:
        raise click.ClickException(str(error)) from None
    except subprocess.TimeoutExpired as error:
        raise click.ClickException(f"the ranks had not ended after {error.timeout:.0f} s") from None
    network_words = preset or f"{rate:g} Mbit/s, {rtt:g} ms, {loss:g} % loss"
    _show(f"{hosts} hosts, {network_words}, {at_once} at once", results)
    if output is not None:
        settings = {"hosts": hosts, "network": network_words, "jitter_ms": jitter, **request}
        with output.open("a") as file:
            file.write(json.dumps({"wan": settings, "found": [asdict(row) for row in results]}) + "\n")


if __name__ == "__main__":
    begin()
    main()
