"""Trains a small network of JAX on equal parts of the data: the gradients are averaged inside the compiled step.

unisono run -n 2 examples/jax_data_parallel.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import unisono as un
import unisono.jax as uj

SAMPLES, FEATURES, HIDDEN, STEPS = 128, 8, 16, 100


def loss(weights: Any, x: Any, y: Any) -> Any:
    """Return the mean squared error of the network on samples `x` with results `y`."""
    hidden = jnp.tanh(x @ weights["in"])
    return jnp.mean((hidden @ weights["out"] - y) ** 2)


def train(comm: un.Communicator) -> float:
    """Return the loss over all samples after the last step; it does not depend on the number of ranks."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (SAMPLES, FEATURES))
    y = jnp.sin(x.sum(axis=1, keepdims=True))
    weights = {
        "in": 0.3 * jax.random.normal(keys[1], (FEATURES, HIDDEN)),
        "out": 0.3 * jax.random.normal(keys[2], (HIDDEN, 1)),
    }
    part = slice(comm.rank * SAMPLES // comm.size, (comm.rank + 1) * SAMPLES // comm.size)
    average = partial(uj.allreduce, op="avg", comm=comm)

    def run(weights: Any) -> Any:
        def step(_: int, weights: Any) -> Any:
            gradients = jax.tree.map(average, jax.grad(loss)(weights, x[part], y[part]))
            return jax.tree.map(lambda weight, gradient: weight - 0.2 * gradient, weights, gradients)

        return average(loss(jax.lax.fori_loop(0, STEPS, step, weights), x[part], y[part]))

    return float(jax.jit(run)(weights))


if __name__ == "__main__":
    with un.init() as world:
        result = train(world)
        if world.rank == 0:
            print(f"loss {result:.6f} with {world.size} ranks")
