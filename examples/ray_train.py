"""Trains with Ray Train, whose workers average gradients through the backend "unisono" of torch.distributed.

`TorchConfig(backend="unisono")` is the only line about Unisono. torch loads the backend itself when it is imported.
"""

from __future__ import annotations

import tempfile

import ray
import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn

STEPS = 30


def train() -> None:
    """Fit a line on this worker's half of the points."""
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 64)[:, None]
    y = 3 * x - 1
    model = prepare_model(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(model(x[rank::size]), y[rank::size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if loss.item() > 1e-2:
        raise ValueError(f"the loss is {loss.item()}")
    print(f"worker {rank} of {size}: loss {loss.item():.2e}, by the backend {torch.distributed.get_backend()!r}")


def main() -> None:
    """Train on two workers."""
    ray.init(num_cpus=4, include_dashboard=False, ignore_reinit_error=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            torch_config=TorchConfig(backend="unisono"),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        )
        trainer.fit()  # raises the error of a worker
    print("2 workers of Ray Train have fitted the line")


if __name__ == "__main__":
    main()
