"""Measures the steps of DDP over Unisono and over Gloo: ``unisono bench ddp [-n 2] [--layers 3] [--json]``.

`DistributedDataParallel` trains a transformer. In every round there is one step over each backend, one step by
`unisono.torch.DistributedOptimizer` ("engine"), one by that of `unisono.compat.horovod` ("horovod"), and one without
communication. The difference to the last one is the exposed communication. `best_…` are the times of the best steps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import unisono as un
from unisono.bench import argument_types

BACKENDS = ("unisono", "gloo")
_WARM_UPS = 8
_WIDTH = 512
_TOKENS = 64


def main() -> None:
    """Measure the training steps of DDP over Unisono and over Gloo, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", "--ranks", type=argument_types.count, default=2)
    parser.add_argument("--layers", type=argument_types.count, default=3, help="of 3.2 million parameters each")
    parser.add_argument("--rounds", type=argument_types.count, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    row = measure(options.ranks, options.layers, options.rounds)
    lines = [json.dumps(row)] if options.json else [f"{name:>20} {number:.1f}" for name, number in row.items()]
    sys.stdout.write("\n".join(lines) + "\n")


def measure(ranks: int, layers: int, rounds: int) -> dict[str, float]:
    """Return medians over rounds for the slowest rank, in milliseconds; `exposed_…` are differences to `alone_ms`."""
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        results = un.launch(_measure_rank, ranks, f"file://{folder}/meeting", layers, rounds)
    row: dict[str, float] = {name: max(one[name] for one in results) for name in results[0]}
    for kind in ("", "best_"):
        for name in (*BACKENDS, "engine", "horovod"):
            row[f"exposed_{kind}{name}_ms"] = row[f"{kind}{name}_ms"] - row[f"{kind}alone_ms"]
    return row


def _measure_rank(world: un.Communicator, url: str, layers: int, rounds: int) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    import unisono.compat.horovod.torch as hvd

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.size))
    dist.init_process_group("unisono", init_method=url, rank=world.rank, world_size=world.size)
    groups = {backend: dist.new_group(list(range(world.size)), backend=backend) for backend in BACKENDS}
    models = {backend: _parallel(new_model(layers), group) for backend, group in groups.items()}
    engine = new_model(layers)
    optimizer = un.torch.DistributedOptimizer(torch.optim.SGD(engine.parameters(), lr=0.0), world)
    hvd.init(comm=world)
    by_name = new_model(layers)
    averaging = hvd.DistributedOptimizer(torch.optim.SGD(by_name.parameters(), lr=0.0), by_name.named_parameters())
    steps: dict[str, Callable[[], None]] = {name: partial(step, model) for name, model in models.items()}

    def alone() -> None:
        with models["unisono"].no_sync():
            step(models["unisono"])

    steps["engine"] = lambda: step(engine, optimizer.synchronize)
    steps["horovod"] = lambda: step(by_name, averaging.synchronize)
    steps["alone"] = alone
    taken = times_of(steps, world.barrier, rounds)
    optimizer.close()
    hvd.shutdown()
    dist.destroy_process_group()
    return taken


def times_of(steps: dict[str, Callable[[], None]], barrier: Callable[[], object], rounds: int) -> dict[str, float]:
    """Measure a step of each kind in every round; return the medians as ``…_ms`` and the minima as ``best_…_ms``."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(_WARM_UPS + rounds):
        for name, make_step in steps.items():
            barrier()
            began = time.perf_counter()
            make_step()
            taken[name].append((time.perf_counter() - began) * 1e3)
    medians = {f"{name}_ms": median(times[_WARM_UPS:]) for name, times in taken.items()}
    return {**medians, **{f"best_{name}_ms": min(times[_WARM_UPS:]) for name, times in taken.items()}}


def new_model(layers: int) -> Any:
    """Return a transformer; the same on all ranks."""
    import torch

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(_WIDTH, 8, dim_feedforward=4 * _WIDTH, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def _parallel(model: Any, group: Any) -> Any:
    import torch

    return torch.nn.parallel.DistributedDataParallel(model, process_group=group)


def step(model: Any, synchronize: Callable[[], None] = lambda: None) -> None:
    """Compute the gradients of a model, wait for their averages, and reset them."""
    import torch

    model(torch.ones(1, _TOKENS, _WIDTH)).sum().backward()
    synchronize()
    model.zero_grad()


if __name__ == "__main__":
    main()
