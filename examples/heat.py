"""The heat equation in three dimensions on a grid of ranks, whose halos are exchanged while the interior is computed.

unisono run -n 4 examples/heat.py

Rank 0 compares the result with that of one process. Each element is computed by the same operations, so the bits agree.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import numpy as np

import unisono as un

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Field = NDArray[np.float64]

LENGTH, STEPS, DIFFUSION = 24, 50, 0.1


def heated(u: Field) -> Field:
    """Return all elements but the outermost ones after a time step."""
    inner = u[1:-1, 1:-1, 1:-1]
    around = u[:-2, 1:-1, 1:-1] + u[2:, 1:-1, 1:-1]
    around = around + u[1:-1, :-2, 1:-1] + u[1:-1, 2:, 1:-1]
    around = around + u[1:-1, 1:-1, :-2] + u[1:-1, 1:-1, 2:]
    result: Field = inner + DIFFUSION * (around - 6 * inner)
    return result


def serial(field: Field) -> Field:
    """Return the field after all time steps, on one rank; outside it is 0."""
    u = np.pad(field, 1)
    for _ in range(STEPS):
        u[1:-1, 1:-1, 1:-1] = heated(u)
    return u[1:-1, 1:-1, 1:-1]


def parallel(grid: un.Grid, field: Field) -> Field:
    """Return this rank's part of the field after all time steps."""
    u = np.pad(field[part_of(grid, grid.rank)], 1)
    after = np.empty_like(u[1:-1, 1:-1, 1:-1])
    halo = grid.halo(u)
    for _ in range(STEPS):
        halo.start()
        after[1:-1, 1:-1, 1:-1] = heated(u[1:-1, 1:-1, 1:-1])  # it needs no ghost layer
        halo.wait()
        for axis, side in product(range(3), (slice(None, 3), slice(-3, None))):
            outer = tuple(side if each == axis else slice(None) for each in range(3))
            edge = slice(None, 1) if side.start is None else slice(-1, None)
            after[tuple(edge if each == axis else slice(None) for each in range(3))] = heated(u[outer])
        u[1:-1, 1:-1, 1:-1] = after
    return after


def part_of(grid: un.Grid, rank: int) -> tuple[slice, ...]:
    """Return the part of the field that a rank has; parts are nearly equal."""
    places = zip(grid.coordinates(rank), grid.dims, strict=True)
    return tuple(slice(at * LENGTH // length, (at + 1) * LENGTH // length) for at, length in places)


def run(world: un.Communicator) -> bool:
    """Return whether the results of all ranks together are those of one rank."""
    field = np.random.default_rng(1).random((LENGTH,) * 3)
    with world.grid(3) as grid:
        parts = grid.gather_object(parallel(grid, field))
        if parts is None:
            return True
        whole = np.empty_like(field)
        for rank, part in enumerate(parts):
            whole[part_of(grid, rank)] = part
        is_equal = np.array_equal(whole, serial(field))
        print(f"{' × '.join(map(str, grid.dims))} ranks, {STEPS} steps: {'the same' if is_equal else 'other'} bits")
        return is_equal


if __name__ == "__main__":
    with un.init() as world:
        if not run(world):
            raise SystemExit("the ranks have another result than one rank")
