"""Measures the time to a loss across a wide-area network: methods that communicate in each step, and rarely.

    sudo unisono bench training --preset two-continents --hosts 4 --model transformer
    sudo unisono bench training --preset home --model digits --methods synchronous,diloco,streaming

Each host trains a model of torch by AdamW, on data of its own. The methods run one after the other on the same hosts,
from the same parameters and with the same batches. All hosts share the cores of this machine, so the times of computing
are those of a busy machine. They are the same for all methods.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from unisono.bench import peers
from unisono.bench.namespaces import address, run_ranks
from unisono.bench.wide_area import MOST_HOSTS, PRESETS, wide_area
from unisono.errors import UsageError
from unisono.foundation.near_names import did_you_mean
from unisono.foundation.program import begin

RANK = Path(__file__).resolve().parent / "ranks" / "training_rank.py"
_SINGLE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_PORT = 29511
# A host that has not averaged yet has sent few bytes, and the axis of bytes is logarithmic.
_LEAST_DRAWN = 10_000
# For each model, the width of a layer; the transformer then has 1.3 million parameters.
WIDTHS = {"transformer": 160, "digits": 128}


def methods_of(inner_steps: int) -> dict[str, list[Any]]:
    """Return all methods by name, in the form of `TrainingRequest.method`."""
    streaming = {"inner_steps": inner_steps, "fragments": 3, "overlap": min(5, inner_steps // 3 - 1), "mixing": 0.5}
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
        "swarm": ["swarm", "DiLoCo", streaming],
        "swarm-loss": ["swarm", "DiLoCo", {**streaming, "lost": True}],
        "ddp-gloo": ["ddp", "", {}],
        "torchft": ["torchft", "", {"inner_steps": inner_steps}],
        "torchft-streaming": ["torchft", "", streaming],
    }


def chosen(names: str, inner_steps: int) -> dict[str, list[Any]]:
    """Return the methods of these names, with commas between; for "all", those whose libraries are installed.

    Raises:
        UsageError: there is no such method, or its library is not installed.
    """
    every = methods_of(inner_steps)
    if names == "all":
        return {name: method for name, method in every.items() if not _missing(method)}
    methods = {}
    for name in names.split(","):
        if name not in every:
            raise UsageError(f"there is no method {name!r}: choose from {', '.join(every)}{did_you_mean(name, every)}")
        methods[name] = every[name]
        if missing := _missing(every[name]):
            raise UsageError(f"{name} needs {missing}: `unisono bench peers install {missing}` installs it")
    return methods


def _missing(method: list[Any]) -> str:
    """Return the name of the environment that a method lacks, or an empty text."""
    kind = str(method[0])
    return kind if kind in peers.SEEING and not peers.is_complete(peers.ROOT / kind) else ""


def _python(method: list[Any]) -> str:
    """Return the Python in which a method runs: that of its own environment of `bench.peers`, or else this one."""
    kind = method[0]
    return str((peers.ROOT / kind / "bin" / "python").absolute()) if kind in peers.SEEING else sys.executable


def time_to(curve: list[list[float]], loss: float) -> float | None:
    """Return the seconds after which a loss was reached, to the next measured point; None if it was not reached."""
    return next((seconds for seconds, reached, _ in curve if reached <= loss), None)


def _show(title: str, results: Mapping[str, Any], goal: float | None) -> None:
    first = next(iter(results.values()))[0][-1][1]
    goal = 1.02 * first if goal is None else goal
    table = Table("method", "loss", "s", f"s to {goal:.3f}", "sent MB", "worst stall s", title=title)
    for name, (curve, nbytes, stall_s) in results.items():
        reached = time_to(curve, goal)
        seconds, loss, _ = curve[-1]
        wait = "-" if reached is None else f"{reached:.1f}"
        table.add_row(name, f"{loss:.4f}", f"{seconds:.1f}", wait, f"{nbytes / 1e6:.2f}", f"{stall_s:.2f}")
    Console().print(table)


def drawn(title: str, results: Mapping[str, Any], path: Path) -> None:
    """Draw the losses of all methods by seconds and by bytes into a file of SVG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from unisono.bench.curves import NO_METADATA, SVG

    with mpl.rc_context(SVG):
        figure = Figure(figsize=(10, 4.5), layout="constrained")
        by_time, by_bytes = figure.subplots(1, 2, sharey=True)
        for index, (name, (curve, _, _)) in enumerate(results.items()):
            seconds, losses, nbytes = zip(*curve, strict=True)
            style = {"label": name, "color": f"C{index % 10}", "linestyle": "-" if index < 10 else "--"}
            by_time.plot(seconds, losses, **style)
            sent = [(count / 1e6, loss) for count, loss in zip(nbytes, losses, strict=True) if count >= _LEAST_DRAWN]
            by_bytes.plot(*zip(*sent, strict=True), **style)
        by_time.set(xlabel="seconds", ylabel="loss", xscale="log", yscale="log")
        by_bytes.set(xlabel="MB that a host has sent", xscale="log")
        by_bytes.legend(fontsize="small")
        figure.suptitle(title)
        figure.savefig(path, metadata=NO_METADATA)


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
@click.option("--limit-s", type=click.FloatRange(min=1), default=3600.0, show_default=True, help="Of each method.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="File to append results to.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="File for a picture of the curves.")
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
    limit_s: float,
    output: Path | None,
    svg: Path | None,
) -> None:
    """Compare methods of training by loss, time, bytes and stalls. Needs root, and torch."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    every = max(1, steps // 25)
    request = [model, width or WIDTHS[model], steps, batch, every]
    settings = {"hosts": hosts, "preset": preset, "request": request, "inner_steps": inner_steps}
    title = f"{model}, {hosts} hosts, {preset}, {steps} steps"
    results: dict[str, Any] = {}
    try:
        compared = chosen(methods, inner_steps)
        _check_outputs(output, svg)
        errors = Console(stderr=True)
        with wide_area(PRESETS[preset](hosts), seed) as network:
            for name, method in track(compared.items(), "training", console=errors, transient=True):
                report = _measured(network.namespaces, [*request, method], limit_s)
                if report is None:
                    errors.print(f"{name}: the ranks failed, or had not ended after {limit_s:g} s")
                    continue
                results[name] = report
                if output is not None:
                    _append(output, {**settings, "method": name}, report)
    except UsageError as error:
        raise click.ClickException(str(error)) from None
    if not results:
        raise click.ClickException("no method has ended")
    _show(title, results, loss)
    if svg is not None:
        drawn(title, results, svg)


def _measured(namespaces: Sequence[str], request: list[Any], limit_s: float) -> Any:
    """Return the result of a method on these hosts, or None if its ranks failed or did not end in time."""
    hosts = [address(host) for host in range(len(namespaces))]
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder, "key")
        with open(os.open(key, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(os.urandom(32))
        environ = {**_SINGLE, "GLOO_SOCKET_IFNAME": "eth0", "UNISONO_KEY_FILE": str(key)}
        command = [_python(request[-1]), str(RANK), json.dumps([*request, hosts, _PORT])]
        try:
            report = run_ranks(namespaces, 1, command, environ, limit_s=limit_s)
        except subprocess.TimeoutExpired:
            return None
    return json.loads(report) if report else None


def _check_outputs(*paths: Path | None) -> None:
    """Raise UsageError if a file cannot be written after the work, which takes long."""
    for path in filter(None, paths):
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise UsageError(f"{str(path)!r} cannot be written: name a file in a folder that exists")


def _append(path: Path, settings: Mapping[str, Any], report: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"training": settings, "result": report}) + "\n")


if __name__ == "__main__":
    begin()
    main()
