"""The demonstration of `make demo`: the same training with one rank and with four, then what an allreduce costs here.

Exits with 1 when a loss curve, the accuracy or a sum is not what it must be.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import bandwidth
import digits
import numpy as np
from rich.console import Console
from rich.table import Table

import unisono as un

RANKS = (1, 4)
TRANSPORTS = ("shm", "tcp")
TOLERANCE = 1e-9  # of the loss, in float64: ranks change the order of sums and nothing else
LEAST_ACCURACY = 0.95
TIMEOUT_S = 60.0
BARS = "▁▂▃▄▅▆▇█"

# The ranks import the modules of this folder by name.
FOLDER = str(Path(__file__).resolve().parent)
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(filter(None, [FOLDER, os.environ.get("PYTHONPATH")]))}

console = Console()


def train(ranks: int) -> digits.History:
    """Train with so many processes; all of them must report the same."""
    console.print(f"\n[bold]Training on handwritten digits with {ranks} rank(s)[/bold]")
    histories = un.launch(train_rank, ranks, timeout_s=TIMEOUT_S, env=ENVIRONMENT)
    first: digits.History = histories[0]
    check("all ranks report the same losses", all(history.losses == first.losses for history in histories))
    return first


def train_rank(world: un.Communicator) -> digits.History:
    """Train as one of the ranks; rank 0 shows the progress."""
    return digits.train(world, show_progress=world.rank == 0)


def compare(histories: dict[int, digits.History]) -> None:
    """Show the loss curves and check that they agree."""
    console.print("\n[bold]Loss by epoch[/bold] (the height is its logarithm)")
    for ranks, history in histories.items():
        first, last = history.losses[0], history.losses[-1]
        console.print(
            f"  {ranks} rank(s)  {sparkline(history.losses)}  {first:.3f} → {last:.5f}  "
            f"accuracy {history.accuracy:.3f}  {history.seconds:.2f} s"
        )
    one, many = (np.array(histories[ranks].losses) for ranks in RANKS)
    difference = float(np.abs(one - many).max())
    check(f"the loss curves differ by {difference:.1e}, at most {TOLERANCE:g}", difference <= TOLERANCE)
    for ranks, history in histories.items():
        text = f"accuracy on images never seen, {ranks} rank(s): {history.accuracy:.3f}, above {LEAST_ACCURACY}"
        check(text, history.accuracy > LEAST_ACCURACY)


def sparkline(values: list[float]) -> str:
    """Return one bar per value, its height by the logarithm of the value."""
    logs = np.log(values)
    levels = (logs - logs.min()) / np.ptp(logs) * (len(BARS) - 1)
    return "".join(BARS[round(level)] for level in levels)


def show_bandwidth() -> None:
    """Measure two ranks over each transport and a copy by numpy, and show the table."""
    timings = {
        transport: un.launch(
            bandwidth.measure,
            2,
            bind="core",
            options=un.Options(transport=transport),
            timeout_s=TIMEOUT_S,
            env=ENVIRONMENT,
        )[0]
        for transport in TRANSPORTS
    }
    table = Table(title="\nAllreduce of float32 sums between 2 ranks", title_justify="left")
    table.add_column("size", justify="right")
    for transport in TRANSPORTS:
        table.add_column(f"{transport} time", justify="right")
        table.add_column("busbw GB/s", justify="right")
    table.add_column("numpy copy", justify="right")
    table.add_column("GB/s", justify="right")
    for rows in zip(*timings.values(), strict=True):
        nbytes = rows[0].nbytes
        copy = bandwidth.time_copy(nbytes)
        cells = [(row.seconds, row.bus_bandwidth) for row in rows] + [(copy, nbytes / copy)]
        table.add_row(bandwidth.format_size(nbytes), *(text for cell in cells for text in format_cell(*cell)))
    console.print(table)


def format_cell(seconds: float, bandwidth_: float) -> tuple[str, str]:
    """Return a time and a bandwidth as text."""
    return bandwidth.format_time(seconds), f"{bandwidth_ / 1e9:.3g}"


def check(statement: str, holds: bool) -> None:
    """Show the statement, and end the demonstration if it does not hold."""
    console.print(f"  [green]✓[/green] {statement}" if holds else f"  [red]✗[/red] {statement}", highlight=False)
    if not holds:
        sys.exit(1)


def main() -> None:
    """Run all of it."""
    compare({ranks: train(ranks) for ranks in RANKS})
    show_bandwidth()


if __name__ == "__main__":
    main()
