"""Trains a small network by a `tf.function` on all ranks, and compares the losses with those of one process.

Start it by ``unisono run -n 2 examples/tensorflow_function.py``. Each rank computes the gradients of its part of each
batch, and the tape averages them, so the losses do not depend on the number of ranks.
"""

from __future__ import annotations

import argparse

import numpy as np
import tensorflow as tf

import unisono as un
import unisono.tensorflow as ut

BATCH = 64


def losses(world: un.Communicator, steps: int) -> list[float]:
    """Return the loss of each step."""
    random = np.random.default_rng(0)
    x = random.standard_normal((512, 8)).astype("float32")
    y = (x[:, :4] ** 2).sum(1, keepdims=True) - (x[:, 4:] ** 2).sum(1, keepdims=True)
    initial = random.standard_normal((8, 32)).astype("float32"), random.standard_normal((32, 1)).astype("float32")
    first, second = (tf.Variable(0.3 * array) for array in initial)
    ut.broadcast_variables([first, second], comm=world)
    averager = ut.Averager(world)

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with ut.DistributedGradientTape(tf.GradientTape(), averager=averager) as tape:
            loss = tf.reduce_mean((tf.nn.relu(x @ first) @ second - y) ** 2)
        for variable, gradient in zip([first, second], tape.gradient(loss, [first, second]), strict=True):
            variable.assign_sub(0.01 * gradient)
        return ut.allreduce(loss, "avg", comm=world)

    found = []
    for number in range(steps):
        batch = slice(number * BATCH % 512, number * BATCH % 512 + BATCH)
        found.append(float(step(x[batch][world.rank :: world.size], y[batch][world.rank :: world.size])))
    averager.close()
    return found


def main() -> None:
    """Train on all ranks, and on this rank alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    with un.init() as world:
        together = losses(world, options.steps)
        alone = losses(world.subgroup([world.rank]), options.steps)
        if world.rank == 0:
            print(f"{world.size} ranks: loss {together[0]:.4f} to {together[-1]:.4f}; one process: {alone[-1]:.4f}")
        if not np.allclose(together, alone, rtol=1e-3):
            raise SystemExit("the losses differ")


if __name__ == "__main__":
    main()
