"""A serial training script, made parallel by the calls of the Cray PE ML plugin in five steps.

    unisono run -n 4 examples/mlcomm_digits.py

It learns scikit-learn's handwritten digits by softmax regression in numpy. Comments mark the lines that were added to
the serial script, by step. Without `unisono run`, it runs as the serial script does, on one rank.
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits  # type: ignore[import-untyped]

import unisono.compat.mlcomm as mc  # step 1: import

Array = NDArray[np.float64]

BATCH, LEARNING_RATE = 96, 0.5
TEST_IMAGES = 360


def main() -> None:
    """Train, and print the loss and accuracy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--ksteps", type=int, help="number of synchronous steps; by default, all")
    options = parser.parse_args()

    pixels, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digits))
    pixels, digits = pixels[order] / 16.0, digits[order]
    x, y = pixels[TEST_IMAGES:], digits[TEST_IMAGES:]
    steps = len(y) // BATCH * options.epochs
    weight, bias = np.random.default_rng().normal(scale=0.1, size=(64, 10)), np.zeros(10)

    mc.init(nthreads_per_team=1, nteams=1, max_elements=weight.size + bias.size)  # step 2: init
    mc.config_team(ksteps=steps if options.ksteps is None else options.ksteps, max_steps=steps)
    mc.broadcast([weight, bias], 0)  # step 3: broadcast
    assert mc.check_buffers_match([weight, bias]) == 0

    loss = np.zeros(1)
    for step in range(steps):
        if step % (len(y) // BATCH) == 0:
            shuffled = np.random.default_rng(step).permutation(len(y))
        chosen = shuffled[step % (len(y) // BATCH) * BATCH :][:BATCH]
        mine = chosen[mc.get_rank() :: mc.get_nranks()]  # this rank's part of the batch
        probabilities = softmax(x[mine] @ weight + bias)
        loss[0] = -np.log(probabilities[np.arange(len(mine)), y[mine]]).mean()
        error = (probabilities - np.eye(10)[y[mine]]) / len(mine)
        weight_gradient, bias_gradient = mc.gradients([x[mine].T @ error, error.sum(axis=0)])  # step 4: gradients
        weight -= LEARNING_RATE * weight_gradient
        bias -= LEARNING_RATE * bias_gradient

    mc.average(loss)
    right = (softmax(pixels[:TEST_IMAGES] @ weight + bias).argmax(axis=1) == digits[:TEST_IMAGES]).mean()
    same = mc.check_buffers_match([weight, bias]) == 0
    if mc.get_rank() == 0:
        print(f"{mc.get_nranks()} ranks: loss {loss[0]:.4f}, accuracy {right:.3f}, same parameters: {same}")
    mc.finalize()  # step 5: finalize


def softmax(scores: Array) -> Array:
    """Return the probabilities of the classes, with a row for each image."""
    powers: Array = np.exp(scores - scores.max(axis=1, keepdims=True))
    powers /= powers.sum(axis=1, keepdims=True)
    return powers


if __name__ == "__main__":
    main()
