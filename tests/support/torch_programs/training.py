"""Trains with DDP on two ranks in several ways, and on one rank with the same batches; compares the losses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.torch_programs.meeting import meet
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel

import unisono as un

STEPS = 4
torch.manual_seed(0)
BATCHES = [(torch.randn(8, 20), torch.randint(0, 4, (8,))) for _ in range(STEPS)]
MODEL = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))


class Branches(torch.nn.Module):
    """A model with two parts, which its steps use in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList([torch.nn.Linear(20, 4) for _ in range(2)])
        self.step = 0

    def forward(self, x: Any) -> Any:
        self.step += 1
        return self.parts[self.step % 2](x)


def train(model: Any, share: Callable[[Any], Any], accumulate: bool = False, most: float = float("inf")) -> list[float]:
    """Train on this rank's share of each batch; return the loss after each step, on the whole batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step, (x, y) in enumerate(BATCHES):
        own_x, own_y = share(x), share(y)
        if accumulate and isinstance(model, DistributedDataParallel):
            with model.no_sync():
                (torch.nn.functional.cross_entropy(model(own_x), own_y) / 2).backward()
            (torch.nn.functional.cross_entropy(model(own_x), own_y) / 2).backward()
        else:
            torch.nn.functional.cross_entropy(model(own_x), own_y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), most)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            inner = model.module if isinstance(model, DistributedDataParallel) else model
            if hasattr(inner, "step"):
                inner.step = step
            losses.append(float(torch.nn.functional.cross_entropy(inner(x), y)))
    return losses


def check(name: str, values: list[float], expected: list[float], tolerance: float) -> None:
    worst = max(abs(one - other) for one, other in zip(values, expected, strict=True))
    print(f"{name}: {'equal' if worst <= tolerance else f'{values}, alone {expected}'}")


def bf16_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
    """Call torch's bf16 hook. DDP recognises torch's own function by its name, and refuses it without CUDA."""
    return default_hooks.bf16_compress_hook(state, bucket)


def backends() -> set[str]:
    """Return the backends of all groups, and the names of all threads that Gloo has started."""
    names = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    groups = {name for name, _ in dist.distributed_c10d._world.pg_map.values()}
    return groups | {name for name in names if "gloo" in name.lower()}


def joined(model: Any, rank: int, by_all: bool) -> tuple[list[float], list[float]]:
    """Train on 2 + rank batches with torch's ``join``; return the weights and the expected weights.

    Args:
        model: a DDP model on two ranks.
        rank: this rank.
        by_all: whether gradients are divided by the number of all ranks. Otherwise they are divided by the number of
            ranks that still have a batch.
    """
    alone = copy.deepcopy(model.module)
    optimizer, other = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, alone))
    with model.join(divide_by_initial_world_size=by_all):
        for x, y in BATCHES[: 2 + rank]:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x * (1 + rank)), y).backward()
            optimizer.step()
    for step, (x, y) in enumerate(BATCHES[:3]):
        other.zero_grad()
        factors = [1, 2] if step < 2 else [2]
        for factor in factors:
            (torch.nn.functional.cross_entropy(alone(x * factor), y) / (2 if by_all else len(factors))).backward()
        other.step()
    result, expected = (
        [number for parameter in module.parameters() for number in parameter.detach().flatten().tolist()]
        for module in (model, alone)
    )
    return result, expected


def main() -> None:
    rank, size = meet()
    alone = train(copy.deepcopy(MODEL), lambda batch: batch)

    def share(batch: Any) -> Any:
        return batch.chunk(size)[rank]

    def ddp(model: Any = MODEL, hook: Any = None, state: Any = None, **arguments: Any) -> Any:
        wrapped = DistributedDataParallel(copy.deepcopy(model), **arguments)
        if hook is not None:
            wrapped.register_comm_hook(state, hook)
        return wrapped

    check("plain", train(ddp(), share), alone, 1e-5)
    check("small buckets", train(ddp(bucket_cap_mb=0.001, gradient_as_bucket_view=True), share), alone, 1e-5)
    check("static graph", train(ddp(static_graph=True), share), alone, 1e-5)
    check("no_sync", train(ddp(), share, accumulate=True), alone, 1e-5)
    branches = Branches()
    expected = train(copy.deepcopy(branches), lambda batch: batch)
    check("unused parameters", train(ddp(branches, find_unused_parameters=True), share), expected, 1e-5)
    check("hook", train(ddp(hook=default_hooks.allreduce_hook), share), alone, 1e-5)
    check("fp16 hook", train(ddp(hook=default_hooks.fp16_compress_hook), share), alone, 1e-2)
    check("bf16 hook", train(ddp(hook=bf16_hook), share), alone, 5e-2)
    state = power.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    check("PowerSGD", train(ddp(hook=power.powerSGD_hook, state=state), share), alone, 0.5)
    world = un.torch.communicator()
    with world.dup() as other:
        check("our hook", train(ddp(hook=un.torch.ddp_hook(other)), share), alone, 1e-5)
        clipped = train(copy.deepcopy(MODEL), lambda batch: batch, most=0.1)
        check("our hook, clipped", train(ddp(hook=un.torch.ddp_hook(other)), share, most=0.1), clipped, 1e-5)
        check("our int8 hook", train(ddp(hook=un.torch.ddp_hook(other, "int8")), share), alone, 1e-2)
    for by_all in (True, False):
        check(f"join, {by_all}", *joined(ddp(), rank, by_all), 1e-5)
    print(f"backends: {'equal' if backends() == {'unisono'} else backends()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
