"""A rank of the stage `ddp`: trains a small model in several ways on the same data, and compares losses and times.

All ways train in one process, one after the other. Each begins with the same parameters. The first ways are torch's DDP
over Gloo, with whose losses those of the others are compared. Rank 0 prints a record of each way when it ends.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import unisono as un
from unisono.bench.gpu_stages.results.records import reason_of, tell

CLASSES, BATCH = 10, 64
WARM_UP = 2  # steps that are not timed
RATE, MOMENTUM = 0.05, 0.9
LEAST_LOSS = 0.1  # differences of smaller losses count as those of this one
GLOO, GLOO_MIXED = "gloo", "gloo, mixed precision"

Step = Callable[[Any, Any], Any]  # makes a training step on inputs and labels, and returns the loss


class TrainingPlace(NamedTuple):
    """Where a rank trains: torch, its device, the ranks, and a process group of Gloo."""

    torch: Any
    device: Any
    world: un.Communicator
    gloo: Any
    width: int
    compiler: str

    def model(self) -> Any:
        """Return a new model with the same parameters on all ranks."""
        torch, width = self.torch, self.width
        torch.manual_seed(0)
        layers = [torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers, torch.nn.Linear(width, CLASSES)).to(self.device)

    def optimizer(self, model: Any) -> Any:
        """Return the optimizer of a model."""
        return self.torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)

    def loss(self, model: Any, x: Any, y: Any) -> Any:
        """Return the loss of a model."""
        return self.torch.nn.functional.cross_entropy(model(x), y)

    def finish(self) -> None:
        """Wait until the device has done all work."""
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()


def plain_step(place: TrainingPlace, model: Any, optimizer: Any) -> Step:
    """Return a step in which backward or the optimizer averages the gradients."""

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = place.loss(model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def in_ddp(place: TrainingPlace, model: Any, group: Any = None) -> Any:
    """Return a model in torch's DDP; the group None is that of Unisono."""
    return place.torch.nn.parallel.DistributedDataParallel(model, process_group=group)


def by_ddp(place: TrainingPlace, group: Any = None) -> Step:
    """Train by DDP."""
    model = in_ddp(place, place.model(), group)
    return plain_step(place, model, place.optimizer(model))


def by_hook(place: TrainingPlace, compression: str | None = None) -> Step:
    """Train by DDP whose gradients a hook averages."""
    model = in_ddp(place, place.model(), place.gloo)
    model.register_comm_hook(None, un.torch.ddp_hook(place.world, compression))
    return plain_step(place, model, place.optimizer(model))


def by_mixed_precision(place: TrainingPlace, group: Any = None) -> Step:
    """Train by DDP in float16 with scaled losses; on the CPU in bfloat16."""
    torch, kind = place.torch, place.device.type
    dtype = torch.float16 if kind == "cuda" else torch.bfloat16
    model, scaler = in_ddp(place, place.model(), group), torch.amp.GradScaler(kind)
    optimizer = place.optimizer(model)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        with torch.autocast(kind, dtype):
            loss = place.loss(model, x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


def by_optimizer(place: TrainingPlace, compression: str | None = None) -> Step:
    """Train by the optimizer that averages gradients."""
    model = place.model()
    inner, named = place.optimizer(model), model.named_parameters()
    optimizer = un.torch.DistributedOptimizer(inner, place.world, named_parameters=named, compression=compression)
    return plain_step(place, model, optimizer)


def by_reducer(place: TrainingPlace, compression: str | None = None) -> Step:
    """Train by a reducer of gradients."""
    model = place.model()
    optimizer, reducer = place.optimizer(model), un.GradientReducer(place.world, compression=compression)
    reducer.__enter__()

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = place.loss(model, x, y)
        loss.backward()
        for name, parameter in model.named_parameters():
            reducer.ready(name, parameter.grad)
        averages = reducer.finish()
        for name, parameter in model.named_parameters():
            parameter.grad.copy_(averages[name])
        optimizer.step()
        return loss

    return step


def by_fsdp(place: TrainingPlace) -> Step:
    """Train by FSDP2, over the backend of the default group."""
    fsdp = importlib.import_module("torch.distributed.fsdp")
    mesh = importlib.import_module("torch.distributed.device_mesh")
    ranks = mesh.init_device_mesh(place.device.type, (place.world.size,))
    model = place.model()
    for layer in model:
        if list(layer.parameters()):
            fsdp.fully_shard(layer, mesh=ranks)
    fsdp.fully_shard(model, mesh=ranks)
    return plain_step(place, model, place.optimizer(model))


def by_compiled_model(place: TrainingPlace) -> Step:
    """Train a compiled model by DDP."""
    model = in_ddp(place, place.torch.compile(place.model(), backend=place.compiler))
    return plain_step(place, model, place.optimizer(model))


class TrainingWay(NamedTuple):
    """A name for a way to train, with the function that trains so.

    Attributes:
        begin: makes the model; returns the function of a step.
        reference: the way whose losses it must have; "" for none.
        within: the greatest relative difference of a loss. Ranks that average nothing differ by more than 0.1.
    """

    begin: Callable[[TrainingPlace], Step]
    reference: str = GLOO
    within: float = 1e-5


WAYS = {
    GLOO: TrainingWay(lambda place: by_ddp(place, place.gloo), ""),
    "DDP": TrainingWay(by_ddp, within=1e-6),
    "ddp_hook": TrainingWay(by_hook, within=1e-6),
    "ddp_hook, int8": TrainingWay(lambda place: by_hook(place, "int8"), within=0.02),
    "DistributedOptimizer": TrainingWay(by_optimizer),
    "DistributedOptimizer, float16": TrainingWay(lambda place: by_optimizer(place, "float16"), within=0.005),
    "DistributedOptimizer, int8": TrainingWay(lambda place: by_optimizer(place, "int8"), within=0.02),
    "GradientReducer": TrainingWay(by_reducer),
    "GradientReducer, float16": TrainingWay(lambda place: by_reducer(place, "float16"), within=0.005),
    "GradientReducer, int8": TrainingWay(lambda place: by_reducer(place, "int8"), within=0.02),
    GLOO_MIXED: TrainingWay(lambda place: by_mixed_precision(place, place.gloo), ""),
    "DDP, mixed precision": TrainingWay(by_mixed_precision, GLOO_MIXED, 1e-6),
    "FSDP2": TrainingWay(by_fsdp, within=1e-4),
    "DDP of a compiled model": TrainingWay(by_compiled_model, within=1e-3),
}


class TrainingHistory(NamedTuple):
    """The loss of each step, averaged over ranks, and the time of a step on the slowest rank."""

    losses: Any
    step_ms: float


def trained(place: TrainingPlace, way: TrainingWay, steps: int) -> TrainingHistory:
    """Train on this rank's share of a batch, again and again, so that the losses fall as gradients say."""
    torch, step = place.torch, way.begin(place)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH * place.world.size, place.width, generator=generator)
    y = torch.randint(CLASSES, (BATCH * place.world.size,), generator=generator)
    x, y = (whole[place.world.rank :: place.world.size].contiguous().to(place.device) for whole in (x, y))
    losses, times = [], []
    for _ in range(steps):
        place.finish()
        started = time.perf_counter()
        loss = step(x, y)
        place.finish()
        times.append(time.perf_counter() - started)
        losses.append(float(loss.detach()))
    of_all = place.world.allreduce(np.array(losses), "avg")
    slowest = float(place.world.allreduce(np.array([statistics.median(times[WARM_UP:])]), "max")[0])
    return TrainingHistory(of_all, slowest * 1e3)


def report(
    place: TrainingPlace, name: str, way: TrainingWay, histories: dict[str, TrainingHistory], steps: int
) -> None:
    """Train in one way, and print its record on rank 0."""
    about = {"way": name, "device": place.device.type, "ranks": place.world.size, "width": place.width}
    try:
        history = trained(place, way, steps)
    except Exception as error:  # noqa: BLE001  (the other ways go on)
        if place.world.rank == 0:
            tell("training", **about, failure=reason_of(error))
        return
    histories[name] = history
    reference = histories.get(way.reference or name)
    if place.world.rank != 0:
        return
    if reference is None:
        tell("training", **about, failure=f"there is nothing to compare with: {way.reference} has failed")
        return
    scale = np.maximum(np.abs(reference.losses), LEAST_LOSS)
    off = float(np.max(np.abs(history.losses - reference.losses) / scale))
    within = bool(off <= way.within)  # NaN is not
    tell("training", **about, step_ms=history.step_ms, loss=float(history.losses[-1]), off=off, right=within)


def connect(options: argparse.Namespace) -> TrainingPlace:
    """Connect this rank to the others, and return the place where it trains."""
    torch, dist = importlib.import_module("torch"), importlib.import_module("torch.distributed")
    importlib.import_module("unisono.torch")
    device = torch.device("cpu")
    if not options.cpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:unisono,cuda:unisono")
    return TrainingPlace(torch, device, un.init(), dist.new_group(backend="gloo"), options.width, options.compiler)


def main() -> int:
    """Train in the ways that the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ways", default="; ".join(WAYS), help="with semicolons between")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU, which shows that everything runs")
    options = parser.parse_args()
    place, histories = connect(options), dict[str, TrainingHistory]()
    for name in options.ways.split("; "):
        report(place, name, WAYS[name], histories, options.steps)
    place.torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
