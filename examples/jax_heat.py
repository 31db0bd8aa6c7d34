"""The heat equation on a grid whose rows are cut over the ranks, and the start that leads to a given end, by gradients.

unisono run -n 2 examples/jax_heat.py

In each time step a rank gets the rows next to its own from its neighbours. The gradient goes back through the exchange.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import unisono as un
import unisono.jax as uj

GRID, TIMES, STEPS, DIFFUSION = 32, 20, 10, 0.2


def heated(u: Any, comm: un.Communicator) -> Any:
    """Return the rows of this rank after `TIMES` time steps; the border of the grid is cold."""
    up = [(rank, rank - 1) for rank in range(1, comm.size)]
    down = [(rank - 1, rank) for rank in range(1, comm.size)]

    def step(u: Any, _: Any) -> tuple[Any, None]:
        above = uj.permute(u[-1:], down, comm=comm)
        below = uj.permute(u[:1], up, comm=comm)
        wide = jnp.pad(jnp.concatenate([above, u, below]), ((0, 0), (1, 1)))
        around = wide[:-2, 1:-1] + wide[2:, 1:-1] + wide[1:-1, :-2] + wide[1:-1, 2:]
        return u + DIFFUSION * (around - 4 * u), None

    return jax.lax.scan(step, u, None, length=TIMES)[0]


def train(comm: un.Communicator) -> float:
    """Return how far the end is from the given one after the last step; it does not depend on the number of ranks."""
    part = slice(comm.rank * GRID // comm.size, (comm.rank + 1) * GRID // comm.size)
    start = np.random.default_rng(3).random((GRID, GRID), np.float32)[part]

    def loss(guess: Any, end: Any) -> Any:
        return ((heated(guess, comm) - end) ** 2).sum()

    def run(start: Any) -> Any:
        end = heated(start, comm)

        def step(_: int, guess: Any) -> Any:
            return guess - 0.5 * jax.grad(loss)(guess, end)

        guess = jax.lax.fori_loop(0, STEPS, step, jnp.zeros_like(start))
        return uj.allreduce(loss(guess, end), comm=comm)

    return float(jax.jit(run)(start))


if __name__ == "__main__":
    with un.init() as world:
        result = train(world)
        if world.rank == 0:
            print(f"loss {result:.6f} with {world.size} ranks")
