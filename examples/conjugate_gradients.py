"""Conjugate gradients on a grid of ranks: the equation of Poisson in two dimensions, without a matrix.

unisono run -n 4 examples/conjugate_gradients.py

Each rank has a part of the unknowns. A step exchanges a halo, and sums two scalar products over all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import unisono as un

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Field = NDArray[np.float64]

LENGTH, TOLERANCE, MOST_STEPS = 48, 1e-10, 1000


def applied(u: Field) -> Field:
    """Return the product of the matrix of Poisson's equation and a field with ghost layers."""
    around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
    result: Field = 4 * u[1:-1, 1:-1] - around
    return result


def total(grid: un.Grid, product: Field) -> float:
    """Return the sum of the elements of all ranks."""
    return float(grid.allreduce(np.array(product.sum())))


def solve(grid: un.Grid, right: Field) -> tuple[Field, int]:
    """Return this rank's part of the solution, and the number of steps.

    Args:
        grid: the ranks.
        right: this rank's part of the right-hand side.
    """
    x, residual = np.zeros_like(right), right.copy()
    direction = np.pad(residual, 1)  # outside of the grid it stays 0
    halo = grid.halo(direction)
    inner = direction[1:-1, 1:-1]
    norm = first = total(grid, residual * residual)
    for step in range(MOST_STEPS):
        if norm <= TOLERANCE**2 * first:
            return x, step
        halo.start()
        halo.wait()
        image = applied(direction)
        length = norm / total(grid, inner * image)
        x += length * inner
        residual -= length * image
        norm, before = total(grid, residual * residual), norm
        inner[...] = residual + norm / before * inner
    return x, MOST_STEPS


def part_of(grid: un.Grid, rank: int) -> tuple[slice, ...]:
    """Return the part of the unknowns that a rank has; parts are nearly equal."""
    places = zip(grid.coordinates(rank), grid.dims, strict=True)
    return tuple(slice(at * LENGTH // length, (at + 1) * LENGTH // length) for at, length in places)


def direct(right: Field) -> Field:
    """Return the solution by the eigenvectors of the matrix, which are sines."""
    numbers = np.arange(1, LENGTH + 1) * np.pi / (LENGTH + 1)
    sines = np.sqrt(2 / (LENGTH + 1)) * np.sin(np.outer(numbers, np.arange(1, LENGTH + 1)))
    values = 2 - 2 * np.cos(numbers)
    result: Field = sines @ ((sines @ right @ sines) / (values[:, None] + values)) @ sines
    return result


def run(world: un.Communicator) -> None:
    """Print on rank 0 how the solution of all ranks differs from the direct one."""
    right = np.random.default_rng(1).random((LENGTH,) * 2)
    with world.grid(2) as grid:
        part, steps = solve(grid, right[part_of(grid, grid.rank)])
        parts = grid.gather_object(part)
        if parts is None:
            return
        whole = np.empty_like(right)
        for rank, each in enumerate(parts):
            whole[part_of(grid, rank)] = each
        same = "the direct" if np.allclose(whole, direct(right), rtol=1e-8, atol=0) else "another"
        print(f"{' × '.join(map(str, grid.dims))} ranks, {steps} steps: {same} solution")


if __name__ == "__main__":
    with un.init() as world:
        run(world)
