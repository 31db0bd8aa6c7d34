"""Attention over a sequence that is cut over the ranks: keys and values go around the ring, and queries stay.

unisono run -n 2 examples/jax_ring_attention.py

Each rank keeps the largest score, the sum of the exponentials and the weighted sum of the values seen so far, and so
never holds the scores of the whole sequence (H. Liu, M. Zaharia, P. Abbeel, Ring Attention with Blockwise Transformers
for Near-Infinite Context, 2023).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import unisono as un
import unisono.jax as uj

LENGTH, WIDTH, STEPS = 64, 16, 20


def attention(q: Any, k: Any, v: Any, comm: un.Communicator) -> Any:
    """Return this rank's rows of the attention of all queries to all keys."""
    ring = [(rank, (rank + 1) % comm.size) for rank in range(comm.size)]

    def add_block(state: Any, _: Any) -> tuple[Any, None]:
        most, weight, values, k, v = state
        scores = q @ k.T / jnp.sqrt(WIDTH)
        more = jnp.maximum(most, scores.max(axis=1, keepdims=True))
        exponentials, shrink = jnp.exp(scores - more), jnp.exp(most - more)
        weight = weight * shrink + exponentials.sum(axis=1, keepdims=True)
        values = values * shrink + exponentials @ v
        return (more, weight, values, uj.permute(k, ring, comm=comm), uj.permute(v, ring, comm=comm)), None

    rows = q.shape[0]
    state = jnp.full((rows, 1), -1e30), jnp.zeros((rows, 1)), jnp.zeros_like(v), k, v
    (_, weight, values, _, _), _ = jax.lax.scan(add_block, state, None, length=comm.size)
    return values / weight


def train(comm: un.Communicator) -> float:
    """Return the loss after the last step; it does not depend on the number of ranks."""
    random = np.random.default_rng(2)
    part = slice(comm.rank * LENGTH // comm.size, (comm.rank + 1) * LENGTH // comm.size)
    x = random.standard_normal((LENGTH, WIDTH), np.float32)[part]
    weights = tuple(0.3 * random.standard_normal((WIDTH, WIDTH), np.float32) for _ in range(3))
    total = partial(uj.allreduce, comm=comm)

    def loss(weights: Any) -> Any:
        """Return this rank's part: JAX differentiates the sum of all parts, because keys and values visit all ranks."""
        q, k, v = (x @ weight for weight in weights)
        return ((attention(q, k, v, comm) - jnp.roll(x, 1, axis=1)) ** 2).sum() / (LENGTH * WIDTH)

    def run(weights: Any) -> Any:
        def step(_: int, weights: Any) -> Any:
            gradients = jax.tree.map(total, jax.grad(loss)(weights))
            return jax.tree.map(lambda weight, gradient: weight - gradient, weights, gradients)

        return total(loss(jax.lax.fori_loop(0, STEPS, step, weights)))

    return float(jax.jit(run)(weights))


if __name__ == "__main__":
    with un.init() as world:
        result = train(world)
        if world.rank == 0:
            print(f"loss {result:.6f} with {world.size} ranks")
