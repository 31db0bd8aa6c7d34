"""Trains a small network of JAX by optax on equal parts of the data: a compiled step averages the gradients.

unisono run -n 2 examples/jax_data_parallel.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import unisono as un
import unisono.jax as uj

SAMPLES, FEATURES, HIDDEN, STEPS = 128, 8, 16, 100


def loss(weights: Any, x: Any, y: Any) -> Any:
    """Return the mean squared error of the network on samples `x` with results `y`."""
    hidden = jnp.tanh(x @ weights["in"])
    return jnp.mean((hidden @ weights["out"] - y) ** 2)


def train(comm: un.Communicator) -> float:
    """Return the loss over all samples after the last step; it does not depend on the number of ranks."""
    random = np.random.default_rng(0)
    x = random.standard_normal((SAMPLES, FEATURES), np.float32)
    y = np.sin(x.sum(axis=1, keepdims=True))
    weights = {
        "in": 0.3 * random.standard_normal((FEATURES, HIDDEN), np.float32),
        "out": 0.3 * random.standard_normal((HIDDEN, 1), np.float32),
    }
    part = slice(comm.rank * SAMPLES // comm.size, (comm.rank + 1) * SAMPLES // comm.size)
    average = partial(uj.allreduce, op="avg", comm=comm)
    optimizer = optax.adam(0.02)

    def run(weights: Any) -> Any:
        def step(_: int, state: tuple[Any, Any]) -> tuple[Any, Any]:
            weights, moments = state
            gradients = jax.tree.map(average, jax.grad(loss)(weights, x[part], y[part]))
            updates, moments = optimizer.update(gradients, moments)
            return optax.apply_updates(weights, updates), moments

        weights, _ = jax.lax.fori_loop(0, STEPS, step, (weights, optimizer.init(weights)))
        return average(loss(weights, x[part], y[part]))

    return float(jax.jit(run)(weights))


if __name__ == "__main__":
    with un.init() as world:
        result = train(world)
        if world.rank == 0:
            print(f"loss {result:.6f} with {world.size} ranks")
