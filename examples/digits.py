"""Data-parallel training of a small numpy network on real data: scikit-learn's handwritten digits.

    unisono run -n 4 examples/digits.py

Every rank has all images and the same network. It computes the gradient on its share of each batch. One allreduce
averages the gradients, so that all ranks make the same step. The batches do not depend on the number of ranks, so the
loss curve does not either, except for rounding, because sums are computed in another order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress
from sklearn.datasets import load_digits  # type: ignore[import-untyped]

import unisono as un

Array = NDArray[np.float64]

CLASSES = 10
HIDDEN = 1024  # wide enough that a step takes milliseconds, so that more ranks take less time
SHAPES = ((64, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,))  # weights and biases of two layers
EPOCHS = 40
BATCH = 96
LEARNING_RATE = 0.1
MOMENTUM = 0.9
TEST_IMAGES = 360


@dataclass(frozen=True)
class History:
    """The result of training: mean loss per epoch, accuracy on unseen images, seconds, and images per epoch."""

    losses: list[float]
    accuracy: float
    seconds: float
    images: int

    @property
    def images_per_second(self) -> float:
        """The images of all epochs and all ranks, per second."""
        return self.images * len(self.losses) / self.seconds


@dataclass(frozen=True)
class Images:
    """Images as rows of 64 grey values from 0 to 1, and the digit on each."""

    pixels: Array
    digits: NDArray[np.int64]

    def take(self, chosen: slice | NDArray[np.int64]) -> Images:
        """Return the chosen images."""
        return Images(self.pixels[chosen], self.digits[chosen])

    def __len__(self) -> int:
        return len(self.digits)


def load() -> tuple[Images, Images]:
    """Return the training images and the test images, the same on every rank."""
    data = load_digits()
    images = Images(data.data / 16.0, data.target)
    order = np.random.default_rng(seed=0).permutation(len(images))
    return images.take(order[TEST_IMAGES:]), images.take(order[:TEST_IMAGES])


def views(flat: Array) -> list[Array]:
    """Return the parts of a vector of all parameters, or of their gradient, as arrays of `SHAPES` without copying."""
    ends = np.cumsum([np.prod(shape) for shape in SHAPES])
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), SHAPES, strict=True)]


def initial_parameters(seed: int) -> Array:
    """Return random weights and zero biases, as one vector."""
    random = np.random.default_rng(seed)
    parameters = np.zeros(sum(int(np.prod(shape)) for shape in SHAPES))
    for view in views(parameters):
        if view.ndim == 2:
            view[:] = random.normal(scale=np.sqrt(2.0 / len(view)), size=view.shape)
    return parameters


def forward(parameters: Array, pixels: Array) -> tuple[Array, Array]:
    """Return the hidden layer and the logarithms of the probabilities of the classes, a row per image."""
    weights, bias, out_weights, out_bias = views(parameters)
    hidden = np.maximum(pixels @ weights + bias, 0.0)
    scores = hidden @ out_weights + out_bias
    scores -= scores.max(axis=1, keepdims=True)
    return hidden, scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


def loss_and_gradient(parameters: Array, images: Images, gradient: Array) -> float:
    """Return the cross-entropy summed over the images, and write its gradient."""
    hidden, log_probabilities = forward(parameters, images.pixels)
    rows = np.arange(len(images))
    error = np.exp(log_probabilities)
    error[rows, images.digits] -= 1.0
    hidden_error = (error @ views(parameters)[2].T) * (hidden > 0.0)
    parts = (images.pixels.T @ hidden_error, hidden_error.sum(axis=0), hidden.T @ error, error.sum(axis=0))
    for view, part in zip(views(gradient), parts, strict=True):
        view[:] = part
    return -float(log_probabilities[rows, images.digits].sum())


def train(world: un.Communicator, epochs: int = EPOCHS, on_epoch: Callable[[float], None] | None = None) -> History:
    """Train on the digits; return the history, the same on every rank. `on_epoch(loss)` is called after each epoch."""
    training, test = load()
    parameters = world.broadcast(initial_parameters(seed=world.rank), root=0)
    velocity = np.zeros_like(parameters)
    step = np.empty(len(parameters) + 1)  # the gradient, and the loss in the last element: one allreduce for both
    order = np.random.default_rng(seed=1)
    losses = []
    world.barrier()
    started = time.perf_counter()
    for _ in range(epochs):
        total = 0.0
        for chosen in np.split(order.permutation(len(training)), range(BATCH, len(training), BATCH)):
            share = training.take(chosen[world.rank :: world.size])
            step[-1] = loss_and_gradient(parameters, share, step[:-1])
            step *= world.size / len(chosen)  # so that the average over ranks is the mean over the batch
            world.allreduce(step, op="avg", out=step)
            velocity *= MOMENTUM
            velocity -= LEARNING_RATE * step[:-1]
            parameters += velocity
            total += step[-1] * len(chosen)
        losses.append(total / len(training))
        if on_epoch:
            on_epoch(losses[-1])
    seconds = time.perf_counter() - started
    return History(losses, accuracy(world, parameters, test), seconds, len(training))


def accuracy(world: un.Communicator, parameters: Array, images: Images) -> float:
    """Return the fraction of the images that the network classifies correctly; each rank classifies its share."""
    share = images.take(slice(world.rank, None, world.size))
    _, log_probabilities = forward(parameters, share.pixels)
    correct = np.array([np.count_nonzero(log_probabilities.argmax(axis=1) == share.digits)])
    return float(world.allreduce(correct, op="sum")[0]) / len(images)


def main() -> None:
    """Train, and print the result on rank 0."""
    with un.init() as world, Progress(disable=world.rank != 0) as progress:
        task = progress.add_task("training", total=EPOCHS)
        history = train(world, on_epoch=lambda loss: progress.update(task, advance=1, description=f"loss {loss:.4f}"))
        if world.rank == 0:
            print(f"loss {history.losses[0]:.3f} → {history.losses[-1]:.5f} in {len(history.losses)} epochs")
            print(f"accuracy on {TEST_IMAGES} unseen images: {history.accuracy:.3f}")
            print(f"{history.seconds:.2f} s on {world.size} rank{'s' * (world.size > 1)}")


if __name__ == "__main__":
    main()
