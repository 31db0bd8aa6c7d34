"""Data-parallel training by torch over Unisono: a small network learns scikit-learn's handwritten digits.

    unisono run -n 2 examples/torch_ddp.py

Only the name of the backend differs from other programs with `DistributedDataParallel`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import unisono.torch  # noqa: F401  (registers the backend; torch finds an installed Unisono without it)

EPOCHS = 8


def main() -> None:
    """Train, and print the loss and the fraction of digits that are recognised."""
    dist.init_process_group("unisono")
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    digits = TensorDataset(x[:1500], y[:1500])
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(digits)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for inputs, targets in DataLoader(digits, batch_size=50, sampler=sampler):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {float(total) / 30:.3f}")
    with torch.no_grad():
        right = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()
    if dist.get_rank() == 0:
        print(f"recognised: {float(right):.0%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
