"""The training that every client of the backend repeats on two ranks: its data, its model, and the result."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

ROWS, BATCH, RATE = 24, 8, 0.5

torch.manual_seed(0)
DATA = TensorDataset(torch.randn(ROWS, 20), torch.randint(0, 4, (ROWS,)))
_MODEL = torch.nn.Linear(20, 4)


def model() -> Any:
    """Return a new model; all have the same parameters."""
    return copy.deepcopy(_MODEL)


def optimizer(module: Any) -> Any:
    """Return the optimizer of the training."""
    return torch.optim.SGD(module.parameters(), lr=RATE)


def loss_of(module: Any, x: Any, y: Any) -> Any:
    """Return the loss of a batch."""
    return torch.nn.functional.cross_entropy(module(x), y)


def is_trained(module: Any) -> bool:
    """Return whether the parameters are those of one process that has trained on each batch once, in order."""
    alone = model()
    sgd = optimizer(alone)
    for start in range(0, ROWS, BATCH):
        sgd.zero_grad()
        loss_of(alone, *DATA[start : start + BATCH]).backward()
        sgd.step()
    pairs = zip(alone.state_dict().values(), module.state_dict().values(), strict=True)
    return all(torch.allclose(expected, result, atol=1e-5) for expected, result in pairs)


def backends() -> list[str]:
    """Return the names of the backends of all process groups of this process."""
    return sorted({name for name, _ in dist.distributed_c10d._world.pg_map.values()})
