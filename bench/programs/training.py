"""Measures the time to a loss across a wide-area network: methods that communicate in each step, and rarely.

    sudo unisono bench training --preset two-continents --hosts 4 --model transformer
    sudo unisono bench training --preset home --model digits --methods synchronous,diloco,streaming

Each host trains a model of torch by AdamW, on data of its own. The methods run one after the other on the same hosts,
from the same parameters and with the same batches. All hosts share the cores of this machine, so the times of computing
are those of a busy machine. They are the same for all methods.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from unisono.bench.namespaces import address, run_ranks
from unisono.bench.wide_area import MOST_HOSTS, PRESETS, wide_area
from unisono.errors import UsageError
from unisono.foundation.near_names import did_you_mean
from unisono.foundation.program import begin

RANK = Path(__file__).resolve().parent / "ranks" / "training_rank.py"
_SINGLE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# For each model, the width of a layer; the transformer then has 1.3 million parameters.
WIDTHS = {"transformer": 160, "digits": 128}


def methods_of(inner_steps: int) -> dict[str, list[Any]]:
    """Return all methods by name, in the form of `training_rank.TrainingRequest`."""
    streaming = {"inner_steps": inner_steps, "fragments": 3, "overlap": min(5, inner_steps - 1), "mixing": 0.5}
    return {
        "synchronous": ["synchronous", "", {}],
        "int8": ["synchronous", "", {"compression": "int8"}],
        "onebit": ["synchronous", "", {"compression": "onebit"}],
        "topk": ["synchronous", "", {"compression": "topk:ratio=0.01"}],
        "powersgd": ["synchronous", "", {"compression": "powersgd:rank=4"}],
        "local-sgd": ["local", "LocalSGD", {"inner_steps": inner_steps}],
        "bmuf": ["local", "BlockMomentum", {"inner_steps": inner_steps}],
        "diloco": ["local", "DiLoCo", {"inner_steps": inner_steps}],
        "streaming": ["local", "DiLoCo", streaming],
        "streaming-int4": ["local", "DiLoCo", {**streaming, "compression": "int4"}],
        "ddp-gloo": ["ddp", "", {}],
    }


def chosen(names: str, inner_steps: int) -> dict[str, list[Any]]:
    """Return the methods of these names, with commas between; all for "all".

    Raises:
        UsageError: there is no such method.
    """
    every = methods_of(inner_steps)
    if names == "all":
        return every
    for name in names.split(","):
        if name not in every:
            raise UsageError(f"there is no method {name!r}: choose from {', '.join(every)}{did_you_mean(name, every)}")
    return {name: every[name] for name in names.split(",")}


def time_to(curve: list[tuple[float, float]], loss: float) -> float | None:
    """Return the seconds after which a loss was reached, to the next measured point; None if it was not reached."""
    return next((seconds for seconds, reached in curve if reached <= loss), None)


def _show(title: str, results: Mapping[str, Any], goal: float | None) -> None:
    first = next(iter(results.values()))[0][-1][1]
    goal = 1.02 * first if goal is None else goal
    table = Table("method", "loss", "s", f"s to {goal:.3f}", "sent MB", "worst stall s", title=title)
    for name, (curve, nbytes, stall_s) in results.items():
        reached = time_to(curve, goal)
        seconds, loss = curve[-1]
        wait = "-" if reached is None else f"{reached:.1f}"
        table.add_row(name, f"{loss:.4f}", f"{seconds:.1f}", wait, f"{nbytes / 1e6:.2f}", f"{stall_s:.2f}")
    Console().print(table)


def _end(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


@click.command()
@click.option("--hosts", type=click.IntRange(2, MOST_HOSTS), default=4, show_default=True, help="Namespaces.")
@click.option("--preset", type=click.Choice([*PRESETS]), default="two-continents", show_default=True)
@click.option("--model", type=click.Choice([*WIDTHS]), default="transformer", show_default=True)
@click.option("--width", type=click.IntRange(min=8), help="Width of a layer, a multiple of 4.")
@click.option("--steps", type=click.IntRange(min=5), default=500, show_default=True, help="Steps of each host.")
@click.option("--batch", type=click.IntRange(min=1), default=16, show_default=True, help="Samples of a host in a step.")
@click.option("--inner-steps", type=click.IntRange(min=4), default=50, show_default=True, help="H of local methods.")
@click.option("--methods", default="all", show_default=True, help="Names, with commas between.")
@click.option("--loss", type=float, help="The loss whose time is shown; by default, 1.02 × that of the first method.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of losses and jitter of the network.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="File to append results to.")
def main(
    hosts: int,
    preset: str,
    model: str,
    width: int | None,
    steps: int,
    batch: int,
    inner_steps: int,
    methods: str,
    loss: float | None,
    seed: int,
    output: Path | None,
) -> None:
    """Compare methods of training by loss, time, bytes and stalls. Needs root, and torch."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    try:
        every = max(1, steps // 25)
        request = [model, width or WIDTHS[model], steps, batch, every, chosen(methods, inner_steps), address(0)]
        environ = {**_SINGLE, "GLOO_SOCKET_IFNAME": "eth0"}
        with wide_area(PRESETS[preset](hosts), seed) as network:
            report = run_ranks(network.namespaces, 1, [sys.executable, str(RANK), json.dumps(request)], environ)
    except UsageError as error:
        raise click.ClickException(str(error)) from None
    except subprocess.TimeoutExpired as error:
        raise click.ClickException(f"the ranks had not ended after {error.timeout:.0f} s: train fewer steps") from None
    if not report:
        raise click.ClickException("the ranks failed")
    results = json.loads(report)
    _show(f"{model}, {hosts} hosts, {preset}, {steps} steps", results, loss)
    if output is not None:
        settings = {"hosts": hosts, "preset": preset, "request": request[:5], "inner_steps": inner_steps}
        with output.open("a") as file:
            file.write(json.dumps({"training": settings, "found": results}) + "\n")


if __name__ == "__main__":
    begin()
    main()
