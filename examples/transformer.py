"""Train a small transformer to continue text, on any number of ranks, with an optimizer that averages gradients.

    unisono run -n 4 examples/transformer.py

The text is the descriptions of scikit-learn's data sets, as bytes. Each step uses the same windows of the text, shared
among the ranks. So the losses are those of one process, except for the rounding of sums.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from sklearn import datasets  # type: ignore[import-untyped]
from torch import nn

import unisono as un
from unisono.data_parallel import average_metrics, verify_sync

WIDTH, HEADS, LAYERS, WINDOW = 32, 2, 2, 32
BATCH = 32


class Transformer(nn.Module):  # type: ignore[misc]
    """Predicts each byte of a window from the bytes before it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Parameter(torch.randn(WINDOW, WIDTH) * 0.1)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(WINDOW))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return a score for each possible value of each next byte."""
        scores: torch.Tensor = self.out(self.layers(self.bytes(text) + self.places, mask=self.mask, is_causal=True))
        return scores


def load() -> torch.Tensor:
    """Return the text as bytes."""
    loaders = (datasets.load_iris, datasets.load_wine, datasets.load_digits, datasets.load_breast_cancer)
    text = "".join(load().DESCR for load in loaders)
    return torch.tensor(list(text.encode()), dtype=torch.long)


def train(world: un.Communicator, steps: int, **options: Any) -> list[float]:
    """Train and return the loss of each step over the whole batch; `options` are those of `un.GradientReducer`."""
    torch.set_num_threads(1)
    torch.manual_seed(world.rank)  # the optimizer copies the parameters of rank 0 to all ranks
    model, text = Transformer(), load()
    optimizer = un.torch.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.003), world, named_parameters=model.named_parameters(), **options
    )
    random = np.random.default_rng(1)
    losses = []
    for _ in range(steps):
        starts = random.integers(len(text) - WINDOW, size=BATCH)[world.rank :: world.size]
        windows = torch.stack([text[start : start + WINDOW + 1] for start in starts])
        loss = nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(average_metrics(world, {"loss": loss.detach()}, samples=len(starts))["loss"])
    optimizer.flush()
    verify_sync(world, model.named_parameters())
    optimizer.close()
    return losses


def main() -> None:
    """Train, and print the result on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lag", type=int, default=0, help="how many steps later gradients are applied")
    options = parser.parse_args()
    with un.init() as world:
        losses = train(world, options.steps, lag=options.lag)
        if world.rank == 0:
            print(f"{world.size} ranks: loss {losses[0]:.5f} → {losses[-1]:.5f} in {len(losses)} steps")


if __name__ == "__main__":
    main()
