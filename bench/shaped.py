"""Allreduce between hosts on slow links: network namespaces of this machine, shaped by the kernel.

    sudo python -m unisono.bench.shaped --hosts 4 --rate 1gbit

Each host is a network namespace with one interface, joined to the others by a bridge in a namespace of its own; a token
bucket (`tc … tbf`) limits what the host sends and what it receives. Ranks of one namespace share memory, those of
different ones do not, as on real hosts. In each round rank 0 streams bare bytes over one TCP socket to another host,
which gives the link's payload rate B, and then every algorithm runs once. The bound of an allreduce of n bytes over h
hosts is 2(h − 1)/h · n/B: so much must every host send, whatever the algorithm.

Everything is removed in the end, on Ctrl-C too; what a killed run has left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from unisono.bench.sizes import parse_sizes
from unisono.errors import UsageError

RANK = Path(__file__).resolve().parent / "adapters" / "shaped_rank.py"
PREFIX = "unisono-shaped-"
NETWORK = "10.213.77"
# The bucket holds what the kernel hands down at once, and the queue some milliseconds of the link, as a switch's does.
BURST, QUEUE = "128kb", "2mb"
RUN_LIMIT_S = 600.0
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


def ip(*arguments: str, namespace: str | None = None) -> None:
    """Run `ip`, or `tc` if that is the first argument, in a namespace.

    Raises:
        UsageError: it failed; the message is what it said.
    """
    words = list(arguments) if arguments[0] == "tc" else ["ip", *arguments]
    command = words if namespace is None else ["ip", "netns", "exec", namespace, *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise UsageError(f"{' '.join(command)}: {ended.stderr.strip()}")


def remove(namespaces: Sequence[str]) -> None:
    """Delete the namespaces, and with them all interfaces that they hold."""
    for name in namespaces:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def left_behind() -> list[str]:
    """Return the namespaces of runs that are no more."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    names = [line.split()[0] for line in listed.splitlines() if line.startswith(PREFIX)]
    return [name for name in names if not Path("/proc", name.removeprefix(PREFIX).partition("-")[0]).exists()]


@contextlib.contextmanager
def network(hosts: int, rate: str) -> Iterator[list[str]]:
    """Make the hosts, whose addresses are `NETWORK`.1 and so on; yield the names of their namespaces."""
    remove(left_behind())
    names = [f"{PREFIX}{os.getpid()}-{k}" for k in range(hosts)]
    switch = f"{PREFIX}{os.getpid()}-switch"
    try:
        for name in (switch, *names):
            ip("netns", "add", name)
            ip("link", "set", "lo", "up", namespace=name)
        ip("link", "add", "bridge", "type", "bridge", namespace=switch)
        ip("link", "set", "bridge", "up", namespace=switch)
        for k, name in enumerate(names):
            port = f"port{k}"
            ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name, namespace=switch)
            ip("link", "set", port, "master", "bridge", "up", namespace=switch)
            ip("addr", "add", f"{NETWORK}.{k + 1}/24", "dev", "eth0", namespace=name)
            ip("link", "set", "eth0", "up", namespace=name)
            for place, device in ((switch, port), (name, "eth0")):
                bucket = ("tbf", "rate", rate, "burst", BURST, "limit", QUEUE)
                ip("tc", "qdisc", "add", "dev", device, "root", *bucket, namespace=place)
        yield names
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        remove([*names, switch])


def run(namespaces: Sequence[str], per_host: int, arguments: Sequence[str]) -> list[list[float]]:
    """Run the ranks, host by host, and return the times of rank 0's report: by round, the stream and the algorithms.

    Raises:
        UsageError: a rank failed; it has said why.
    """
    size = len(namespaces) * per_host
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        try:
            for rank in range(size):
                host, local = divmod(rank, per_host)
                place = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local, "LOCAL_SIZE": per_host}
                settings = {"STORE": f"file://{folder}/store", "BIND_ADDRESS": f"{NETWORK}.{host + 1}"}
                told = {f"UNISONO_{name}": str(value) for name, value in {**place, **settings}.items()}
                command = ["ip", "netns", "exec", namespaces[host], sys.executable, str(RANK), *arguments]
                output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
                processes.append(subprocess.Popen(command, env={**os.environ, **told}, stdout=output))
            report, _ = processes[0].communicate(timeout=RUN_LIMIT_S)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for process in processes:
                process.kill()  # all, before one has time to complain of another
            for process in processes:
                process.wait()
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
    arguments = [f"{NETWORK}.1", str(per_host), str(nbytes), str(rounds), *names]
    try:
        with network(hosts, rate) as namespaces:
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
    main()
