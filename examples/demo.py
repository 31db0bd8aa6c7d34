"""The demonstration of `make demo`: the same training with one rank and with a rank per core, then an allreduce.

It exits with 1 if a loss curve, the accuracy or a sum is wrong.
"""

from __future__ import annotations

import os
import sys

import bandwidth
import digits
import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import unisono as un

CORES = len(os.sched_getaffinity(0))
RANKS = (1, min(max(CORES, 2), 8))  # at most 8, because each rank gets a share of a batch of 96 images
TRANSPORTS = ("shm", "tcp")
TOLERANCE = 1e-9  # of the loss, in float64: more ranks only change the order of sums
LEAST_ACCURACY = 0.95
TIMEOUT_S = 60.0
BARS = "▁▂▃▄▅▆▇█"
EPOCH_DONE = "epoch done"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # per rank, so that one rank and many compute alike

console = Console()


def train(ranks: int) -> digits.History:
    """Train with `ranks` processes, show the progress, and check that all of them report the same losses."""
    with Progress(console=console) as progress:
        task = progress.add_task(f"training on {named(ranks)}", total=digits.EPOCHS)

        def on_output(rank: int, stream: str, line: str) -> None:
            if line == EPOCH_DONE:
                progress.advance(task)
            else:
                console.print(f"[{rank}] {line}", markup=False)

        histories: list[digits.History] = un.launch(
            train_rank, ranks, timeout_s=TIMEOUT_S, env=ONE_THREAD, on_output=on_output
        )
    first, *others = histories
    if others:
        check(f"the losses are the same on all {ranks} ranks", all(other.losses == first.losses for other in others))
    return first


def train_rank(world: un.Communicator) -> digits.History:
    """Train as one of the ranks; rank 0 prints a line after each epoch."""
    return digits.train(world, on_epoch=(lambda loss: print(EPOCH_DONE, flush=True)) if world.rank == 0 else None)


def compare(histories: dict[int, digits.History]) -> None:
    """Show the loss curves and check that they agree."""
    console.print("\n[bold]Loss by epoch[/bold] (the height is its logarithm)")
    for ranks, history in histories.items():
        first, last = history.losses[0], history.losses[-1]
        console.print(f"  {named(ranks)} {sparkline(history.losses)} {first:.3f} → {last:.5f}", highlight=False)
    one, many = (np.array(histories[ranks].losses) for ranks in RANKS)
    difference = float(np.abs(one - many).max())
    check(f"the loss curves differ by {difference:.1e}, at most {TOLERANCE:g}", difference <= TOLERANCE)
    for ranks, history in histories.items():
        text = f"{named(ranks)}: {history.accuracy:.1%} of unseen images are recognised, above {LEAST_ACCURACY:.0%}"
        check(text, history.accuracy > LEAST_ACCURACY)


def show_speed(histories: dict[int, digits.History]) -> None:
    """Show the images per second of each training, and why more ranks are not faster where they are not."""
    console.print("\n[bold]Speed[/bold]")
    for ranks, history in histories.items():
        speed = f"{history.images_per_second:,.0f} images/s"
        console.print(f"  {named(ranks)} {history.seconds:.2f} s, {speed}", highlight=False)
    one, many = (histories[ranks].seconds for ranks in RANKS)
    if many < one:
        console.print(f"  {RANKS[1]} ranks are {one / many:.1f} times as fast as one", highlight=False)
    elif RANKS[1] > CORES:
        console.print(f"  {RANKS[1]} ranks share {CORES} core here: they gain time where each has a core of its own")
    else:
        load = os.getloadavg()[0]
        console.print(f"  no gain: other programs use the cores (load {load:.1f} on {CORES} cores); try again later")


def named(ranks: int) -> str:
    """Return ``"1 rank "`` or ``"4 ranks"``, padded to the same width."""
    return f"{ranks} rank{'s' if ranks > 1 else ' '}"


def sparkline(values: list[float]) -> str:
    """Return a bar for each value, with the logarithm of the value as its height."""
    logs = np.log(values)
    levels = (logs - logs.min()) / np.ptp(logs) * (len(BARS) - 1)
    return "".join(BARS[round(level)] for level in levels)


def show_bandwidth() -> None:
    """Measure two ranks over each transport, and a copy by numpy, and show a table."""
    timings = {
        transport: un.launch(
            bandwidth.measure, 2, bind="core", options=un.Options(transports=transport), timeout_s=TIMEOUT_S
        )[0]
        for transport in TRANSPORTS
    }
    title = "Allreduce of float32 sums between 2 ranks (busbw: GB/s as in nccl-tests)"
    table = Table(title=title, title_justify="left", box=SIMPLE)
    for header in ("size", *(header for name in TRANSPORTS for header in (name, "busbw")), "numpy copy", "GB/s"):
        table.add_column(header, justify="right")
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
    """Show the statement, and exit if it does not hold."""
    console.print(f"  [green]✓[/green] {statement}" if holds else f"  [red]✗[/red] {statement}", highlight=False)
    if not holds:
        sys.exit(1)


def main() -> None:
    """Run the demonstration."""
    histories = {ranks: train(ranks) for ranks in RANKS}
    compare(histories)
    show_speed(histories)
    console.print()
    show_bandwidth()


if __name__ == "__main__":
    main()
