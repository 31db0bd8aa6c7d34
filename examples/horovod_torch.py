"""A training script of Horovod. Only its import is changed, and it reaches the loss of a single process.

    unisono run -n 4 examples/horovod_torch.py

Each rank trains on its part of a batch, and `DistributedOptimizer` averages the gradients.
"""

from __future__ import annotations

import math

import torch

import unisono.compat.horovod.torch as hvd  # was: import horovod.torch as hvd

STEPS, BATCH = 40, 96


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the points of a step and the values of the function there, the same on every rank."""
    points = torch.rand((BATCH, 2), generator=torch.Generator().manual_seed(step)) * 2 - 1
    return points, torch.sin(3 * points[:, :1]) * points[:, 1:]


def new_model() -> torch.nn.Sequential:
    """Return the model. Each rank begins with other parameters."""
    return torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def train() -> list[float]:
    """Train with all ranks; return the loss of each step."""
    torch.manual_seed(hvd.rank())
    model = new_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    losses = []
    for step in range(STEPS):
        points, values = batch_of(step)
        part = slice(hvd.rank(), None, hvd.size())
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(points[part]), values[part])
        loss.backward()
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
    return losses


def train_alone() -> list[float]:
    """Train with this process alone; return the loss of each step."""
    torch.manual_seed(0)
    model = new_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for step in range(STEPS):
        points, values = batch_of(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(points), values)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train, and compare the losses with those of a single process."""
    torch.set_num_threads(1)
    hvd.init()
    losses = train()
    if hvd.rank() == 0:
        alone = train_alone()
        assert all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(losses, alone, strict=True)), (losses, alone)
        print(f"loss {losses[0]:.3f} → {losses[-1]:.4f} with {hvd.size()} ranks, as by a single process")
    hvd.shutdown()


if __name__ == "__main__":
    main()
