"""Measure how much of the communication of gradients is exposed, between hosts on slow links.

    sudo python -m unisono.bench.gradients overlap --model transformer --rate 1gbit
    sudo python -m unisono.bench.gradients lag --delay-ms 20

`overlap` compares steps that communicate after backward with those that do while it computes, and both with steps that
do not communicate at all. The steps of a round are compared with each other, so that what else the machine does counts
little. `lag` trains on scikit-learn's digits over a wire with a delay, with gradients that are applied so many steps
late, and beside that by itself. Each rank is a host of `bench.namespaces`, bound to one core, and has a single thread
for computing.

Everything is removed in the end, on Ctrl-C too; what a killed run has left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from unisono.bench.delayed import delayed, delayed_address
from unisono.bench.namespaces import address, missing, network, run_ranks
from unisono.program import begin

RANK = Path(__file__).resolve().parent / "adapters" / "gradients_rank.py"
# By model, the width and the batch for which backward takes about as long as a link of 1 Gbit/s for the gradients, or
# longer, on one core.
SIZES = {"digits": (256, 1024), "transformer": (128, 32)}
_WAYS = {"after": None, "overlapped": None, "float16": "float16", "bfloat16": "bfloat16", "int8": "int8"}
_SINGLE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def run(namespaces: Sequence[str], address_of: Callable[[int], str], request: Sequence[Any]) -> dict[str, Any]:
    """Run a rank in each namespace; return what rank 0 reports.

    Raises:
        click.ClickException: a rank failed; it has said why.
    """
    report = run_ranks(namespaces, 1, [sys.executable, str(RANK), json.dumps(request)], _SINGLE, address_of=address_of)
    if not report:
        raise click.ClickException("the ranks failed")
    found: dict[str, Any] = json.loads(report)
    return found


def shares(found: Mapping[str, Any]) -> dict[str, float]:
    """Return of each way how much of what is exposed without overlap is with it."""
    return {name: ms / found["exposed_ms"]["after"] for name, ms in found["exposed_ms"].items()}


def _interrupted(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


@click.group()
def main() -> None:
    """Measure gradients that are averaged while others are computed. Needs root, `ip` and `tc`."""
    if missing():
        raise click.UsageError(missing())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupted)


def _keep(output: Path | None, document: dict[str, Any]) -> None:
    if output is not None:
        with output.open("a") as file:
            file.write(json.dumps({**document, "load_average": os.getloadavg()[0]}) + "\n")


_JSON = click.option(
    "--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Append the results here."
)
_HOSTS = click.option("--hosts", type=click.IntRange(min=2, max=200), default=2, show_default=True, help="Ranks.")


@main.command()
@click.option("--model", type=click.Choice(list(SIZES)), default="transformer", show_default=True)
@click.option("--width", type=click.IntRange(min=8), help="Of a layer.")
@click.option("--batch", type=click.IntRange(min=2), help="Of all ranks.")
@click.option("--bucket", type=click.IntRange(min=1), help="Bytes of a bucket; by default, they are found out.")
@click.option("--rate", default="1gbit", show_default=True, help="Of each host's link, as tc takes it.")
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True, help="Of each way.")
@_HOSTS
@_JSON
def overlap(
    model: str,
    width: int | None,
    batch: int | None,
    bucket: int | None,
    rate: str,
    rounds: int,
    hosts: int,
    output: Path | None,
) -> None:
    """Compare what is exposed with and without overlap, and with compression."""
    sizes = (width or SIZES[model][0], batch or SIZES[model][1])
    ways = {name: {"compression": form, "bucket_nbytes": bucket} for name, form in _WAYS.items()}
    with network(hosts, rate) as namespaces:
        found = run(namespaces, address, ["overlap", model, rounds, *sizes, ways])
    table = Table("way", title=f"{model}, {found['nbytes']:,} B of gradients, {hosts} hosts, {rate}")
    for heading in ("step ms", "exposed ms", "of that after backward", "waited ms", "buckets", "sent MB"):
        table.add_column(heading, justify="right")
    table.add_row("alone", f"{found['ms']['alone']:.2f}")
    for name, share in shares(found).items():
        times = [f"{found[kind][name]:.2f}" for kind in ("ms", "exposed_ms")]
        sent = f"{found['sent_nbytes'][name] / 1e6:.3f}"
        table.add_row(
            name, *times, f"{share:.2f}", f"{found['waited_ms'][name]:.2f}", f"{found['buckets'][name]}", sent
        )
    Console().print(table)
    asked = dict(zip(("width", "batch"), sizes, strict=True)) | {"bucket": bucket, "rate": rate, "rounds": rounds}
    _keep(output, {"gradients": "overlap", "model": model, **asked, "hosts": hosts, "found": found})


@main.command()
@click.option("--delay-ms", type=click.FloatRange(min=0), default=20.0, show_default=True, help="Of a packet.")
@click.option(
    "--step-ms", type=click.FloatRange(min=0), default=30.0, show_default=True, help="Of computing, at least."
)
@click.option("--lags", default="0,1", show_default=True, help="With commas between.")
@click.option("--width", type=click.IntRange(min=8), default=128, show_default=True, help="Of a layer.")
@click.option("--batch", type=click.IntRange(min=2), default=512, show_default=True, help="Of all ranks.")
@click.option("--rounds", type=click.IntRange(min=1), default=120, show_default=True, help="Steps of each.")
@_HOSTS
@_JSON
def lag(
    delay_ms: float,
    step_ms: float,
    lags: str,
    width: int,
    batch: int,
    rounds: int,
    hosts: int,
    output: Path | None,
) -> None:
    """Train over a wire with a delay, with gradients that are applied late."""
    total = {"total_steps": rounds, "warmup_fraction": 0.1, "cooldown_fraction": 0.1}
    ways = {"alone": {"alone": True}, **{f"lag {k}": {"lag": int(k), **total} for k in lags.split(",")}}
    with contextlib.ExitStack() as stack:
        namespaces = stack.enter_context(network(hosts))
        stack.enter_context(delayed(namespaces, delay_ms / 1e3))
        found = run(namespaces, delayed_address, ["lag", "digits", rounds, width, batch, ways, step_ms / 1e3])
    table = Table("way", title=f"digits, {hosts} hosts, a delay of {delay_ms:g} ms, steps of {step_ms:g} ms")
    table.add_column("steps/s", justify="right")
    table.add_column("accuracy", justify="right")
    for name, row in found.items():
        table.add_row(name, f"{row['steps_per_s']:.1f}", f"{row['accuracy']:.3f}")
    Console().print(table)
    asked = {"delay_ms": delay_ms, "step_ms": step_ms, "width": width, "batch": batch, "rounds": rounds}
    _keep(output, {"gradients": "lag", **asked, "hosts": hosts, "found": found})


if __name__ == "__main__":
    begin()
    main()
