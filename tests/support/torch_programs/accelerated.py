"""Trains with Accelerate over a group of two ranks, trains on the same batches without it, and compares the models."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from support.torch_programs.meeting import meet

torch.manual_seed(0)
MODEL = torch.nn.Linear(20, 4)
BATCHES = [(torch.randn(8, 20), torch.randint(0, 4, (8,))) for _ in range(3)]


def train(model: Any, optimizer: Any, part: slice, accelerator: Any = None) -> list[float]:
    """Train on a part of each batch; return the parameters."""
    clip = accelerator.clip_grad_norm_ if accelerator else torch.nn.utils.clip_grad_norm_
    for x, y in BATCHES:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x[part]), y[part])
        accelerator.backward(loss) if accelerator else loss.backward()
        clip(model.parameters(), 0.1)
        optimizer.step()
    return [number for parameter in model.parameters() for number in parameter.detach().flatten().tolist()]


def main() -> None:
    rank, size = meet()  # before Accelerate, which uses the default group if one exists
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))  # torchrun sets them
    accelerator = Accelerator(cpu=True)
    alone, model = copy.deepcopy(MODEL), copy.deepcopy(MODEL)
    expected = train(alone, torch.optim.SGD(alone.parameters(), lr=0.5), slice(0, 8))
    prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    found = train(*prepared, slice(4 * rank, 4 * rank + 4), accelerator)
    gathered = accelerator.gather(torch.tensor([rank])).tolist()
    near = max(abs(one - other) for one, other in zip(found, expected, strict=True)) < 1e-5
    print(accelerator.num_processes, dist.get_backend(), gathered == list(range(size)), near)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
