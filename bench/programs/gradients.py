"""Measures how much communication of gradients is exposed, between hosts on slow links.

    sudo unisono bench gradients overlap --model transformer --rate 1gbit
    sudo unisono bench gradients lag --delay-ms 20

`overlap` compares training steps that communicate after backward with steps that communicate while backward computes,
and both with steps without communication. Only steps of the same round are compared, so that other load counts little.
`lag` trains on scikit-learn's digits over a link with a delay, and applies gradients some training steps late. It also
trains one rank alone. Each rank is a host of `bench.namespaces`, bound to one core, with a single thread for computing.

All namespaces are removed at the end, also after Ctrl-C. The next run removes those of a killed run.
"""

from __future__ import annotations

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

from unisono.bench.namespaces import missing, network, run_ranks
from unisono.bench.wide_area import MOST_HOSTS, NetworkWay, uniform, wide_area
from unisono.foundation.program import begin

RANK = Path(__file__).resolve().parent / "ranks" / "gradients_rank.py"
# For each model, a width and a batch with which backward takes at least about as long, on one core, as a link of 1
# Gbit/s needs for the gradients.
SIZES = {"digits": (256, 1024), "transformer": (128, 32)}
_WAYS = {"after": None, "overlapped": None, "float16": "float16", "bfloat16": "bfloat16", "int8": "int8"}
_SINGLE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def run(namespaces: Sequence[str], request: Sequence[Any]) -> dict[str, Any]:
    """Run a rank in each namespace; return the report of rank 0.

    Raises:
        click.ClickException: a rank failed; its output says why.
    """
    report = run_ranks(namespaces, 1, [sys.executable, str(RANK), json.dumps(request)], _SINGLE)
    if not report:
        raise click.ClickException("the ranks failed")
    times: dict[str, Any] = json.loads(report)
    return times


def shares(report: Mapping[str, Any]) -> dict[str, float]:
    """Return for each way its exposed time as a part of the exposed time without overlap."""
    return {name: ms / report["exposed_ms"]["after"] for name, ms in report["exposed_ms"].items()}


def _interrupted(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


@click.group()
def main() -> None:
    """Measure gradients that are averaged while others are still computed. Needs root, `ip` and `tc`."""
    if missing():
        raise click.UsageError(missing())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupted)


def _keep(output: Path | None, document: dict[str, Any]) -> None:
    if output is not None:
        with output.open("a") as file:
            file.write(json.dumps({**document, "load_average": os.getloadavg()[0]}) + "\n")


_JSON = click.option(
    "--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="File to append results to."
)


def _hosts(most: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option("--hosts", type=click.IntRange(2, most), default=2, show_default=True, help="Ranks.")


@main.command()
@click.option("--model", type=click.Choice(list(SIZES)), default="transformer", show_default=True)
@click.option("--width", type=click.IntRange(min=8), help="Width of a layer.")
@click.option("--batch", type=click.IntRange(min=2), help="Batch of all ranks together.")
@click.option("--bucket", type=click.IntRange(min=1), help="Bytes of a bucket; by default, measurements decide.")
@click.option("--rate", default="1gbit", show_default=True, help="Rate of each host's link, in the notation of tc.")
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True, help="Steps of each way.")
@_hosts(200)
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
    """Compare exposed communication without overlap, with overlap, and with compression."""
    sizes = (width or SIZES[model][0], batch or SIZES[model][1])
    ways = {name: {"compression": form, "bucket_nbytes": bucket} for name, form in _WAYS.items()}
    with network(hosts, rate) as namespaces:
        report = run(namespaces, ["overlap", model, rounds, *sizes, ways])
    table = Table("way", title=f"{model}, {report['nbytes']:,} B of gradients, {hosts} hosts, {rate}")
    for heading in ("step ms", "exposed ms", "of that after backward", "waited ms", "buckets", "sent MB"):
        table.add_column(heading, justify="right")
    table.add_row("alone", f"{report['ms']['alone']:.2f}")
    for name, share in shares(report).items():
        times = [f"{report[kind][name]:.2f}" for kind in ("ms", "exposed_ms")]
        sent = f"{report['sent_nbytes'][name] / 1e6:.3f}"
        table.add_row(
            name, *times, f"{share:.2f}", f"{report['waited_ms'][name]:.2f}", f"{report['buckets'][name]}", sent
        )
    Console().print(table)
    settings = dict(zip(("width", "batch"), sizes, strict=True)) | {"bucket": bucket, "rate": rate, "rounds": rounds}
    _keep(output, {"gradients": "overlap", "model": model, **settings, "hosts": hosts, "found": report})


@main.command()
@click.option("--delay-ms", type=click.FloatRange(min=0), default=20.0, show_default=True, help="Delay of a packet.")
@click.option(
    "--step-ms", type=click.FloatRange(min=0), default=30.0, show_default=True, help="Least computing time of a step."
)
@click.option("--lags", default="0,1", show_default=True, help="Numbers of steps, with commas between.")
@click.option("--width", type=click.IntRange(min=8), default=128, show_default=True, help="Width of a layer.")
@click.option(
    "--batch", type=click.IntRange(min=2), default=512, show_default=True, help="Batch of all ranks together."
)
@click.option("--rounds", type=click.IntRange(min=1), default=120, show_default=True, help="Steps with each lag.")
@_hosts(MOST_HOSTS)
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
    """Train over a link with a delay, and apply gradients late."""
    total = {"total_steps": rounds, "warmup_fraction": 0.1, "cooldown_fraction": 0.1}
    ways = {"alone": {"alone": True}, **{f"lag {k}": {"lag": int(k), **total} for k in lags.split(",")}}
    with wide_area(uniform(hosts, way=NetworkWay(delay_ms=delay_ms))) as net:
        report = run(net.namespaces, ["lag", "digits", rounds, width, batch, ways, step_ms / 1e3])
    table = Table("way", title=f"digits, {hosts} hosts, a delay of {delay_ms:g} ms, steps of {step_ms:g} ms")
    table.add_column("steps/s", justify="right")
    table.add_column("accuracy", justify="right")
    for name, row in report.items():
        table.add_row(name, f"{row['steps_per_s']:.1f}", f"{row['accuracy']:.3f}")
    Console().print(table)
    settings = {"delay_ms": delay_ms, "step_ms": step_ms, "width": width, "batch": batch, "rounds": rounds}
    _keep(output, {"gradients": "lag", **settings, "hosts": hosts, "found": report})


if __name__ == "__main__":
    begin()
    main()
