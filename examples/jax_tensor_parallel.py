"""Trains two layers whose weights are cut over the ranks: columns of the first one, and rows of the second one.

unisono run -n 2 examples/jax_tensor_parallel.py

A rank computes its part of the hidden layer from the whole input, and the allreduce adds the parts of the output. The
loss is the same on all ranks, so each counts it once: a gradient is divided by their number.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import unisono as un
import unisono.jax as uj

SAMPLES, FEATURES, HIDDEN, STEPS = 64, 8, 32, 50


def train(comm: un.Communicator) -> float:
    """Return the loss after the last step; it does not depend on the number of ranks."""
    random = np.random.default_rng(1)
    x = random.standard_normal((SAMPLES, FEATURES), np.float32)
    y = np.cos(x.sum(axis=1, keepdims=True))
    part = slice(comm.rank * HIDDEN // comm.size, (comm.rank + 1) * HIDDEN // comm.size)
    first = 0.3 * random.standard_normal((FEATURES, HIDDEN), np.float32)[:, part]
    second = 0.3 * random.standard_normal((HIDDEN, 1), np.float32)[part]

    def loss(weights: Any) -> Any:
        mine = jnp.tanh(x @ weights[0]) @ weights[1]
        return jnp.mean((uj.allreduce(mine, comm=comm) - y) ** 2)

    def step(_: int, weights: Any) -> Any:
        gradients = jax.grad(loss)(weights)
        return jax.tree.map(lambda weight, gradient: weight - 0.1 / comm.size * gradient, weights, gradients)

    def run(weights: Any) -> Any:
        return loss(jax.lax.fori_loop(0, STEPS, step, weights))

    # Each process has one device here. With several, the mesh also cuts the arrays over these.
    mesh = Mesh(np.array(jax.devices()[:1]), ("local",))
    whole = PartitionSpec()
    mapped = jax.shard_map(run, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    return float(jax.jit(mapped)((first, second)))


if __name__ == "__main__":
    with un.init() as world:
        result = train(world)
        if world.rank == 0:
            print(f"loss {result:.6f} with {world.size} ranks")
