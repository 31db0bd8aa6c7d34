"""Data-parallel training by torch without a process group: gradients are averaged while backward computes.

    unisono run -n 4 examples/torch_gradients.py --lag 1 --compression int8

The network learns scikit-learn's handwritten digits. Each rank computes on its share of every batch. So the loss does
not depend on the number of ranks, except for rounding. Lag and compression change it a little.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]

import unisono as un
import unisono.torch

EPOCHS, BATCH, TEST_IMAGES = 8, 48, 360
LEARNING_RATE = 0.1


class History(NamedTuple):
    """The mean loss of each epoch, and the fraction of unseen images that are recognised at the end."""

    losses: list[float]
    accuracy: float


def train(world: un.Communicator, epochs: int = EPOCHS, **options: Any) -> History:
    """Train and return the history, the same on every rank; `options` are those of `un.GradientReducer`."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    test, x, y = (x[:TEST_IMAGES], y[:TEST_IMAGES]), x[TEST_IMAGES:], y[TEST_IMAGES:]
    network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    sgd = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE, momentum=0.8)
    optimizer = un.torch.DistributedOptimizer(sgd, world, named_parameters=network.named_parameters(), **options)
    losses = []
    for _ in range(epochs):
        total = torch.zeros(())
        for chosen in torch.randperm(len(y)).split(BATCH)[: len(y) // BATCH]:
            share = chosen[world.rank :: world.size]  # BATCH is a multiple of the ranks, so the shares are equal
            loss = torch.nn.functional.cross_entropy(network(x[share]), y[share])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        losses.append(float(world.allreduce(total, "avg")) / (len(y) // BATCH))
    optimizer.flush()
    with torch.no_grad():
        accuracy = float((network(test[0]).argmax(1) == test[1]).float().mean())
    if world.rank == 0:
        print(optimizer.reducer.report())
    optimizer.close()
    return History(losses, accuracy)


def main() -> None:
    """Train, and print the result on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lag", type=int, default=0)
    parser.add_argument("--compression", choices=["float16", "bfloat16", "int8"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with un.init() as world:
        history = train(world, lag=arguments.lag, compression=arguments.compression)
        if world.rank == 0:
            print(f"loss {history.losses[0]:.3f} → {history.losses[-1]:.3f}, recognised {history.accuracy:.1%}")


if __name__ == "__main__":
    main()
