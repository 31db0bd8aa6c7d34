"""Conjugate gradients for the equation of Poisson by mpi4py, without a word about Unisono."""

import numpy as np
from mpi4py import MPI

LENGTH, TOLERANCE, MOST_STEPS = 48, 1e-10, 1000
world = MPI.COMM_WORLD
grid = world.Create_cart(MPI.Compute_dims(world.Get_size(), 2))


def part_of(rank):
    places = zip(grid.Get_coords(rank), grid.dims, strict=True)
    return tuple(slice(at * LENGTH // length, (at + 1) * LENGTH // length) for at, length in places)


def exchange(u):
    rows, columns = u.shape
    column = MPI.DOUBLE.Create_vector(rows, 1, columns).Commit()
    row = MPI.DOUBLE.Create_contiguous(columns).Commit()
    flat = u.reshape(-1)
    for axis, layout, last, stride in ((0, row, rows - 1, columns), (1, column, columns - 1, 1)):
        below, above = grid.Shift(axis, 1)
        for source, dest, ghost, edge in ((below, above, 0, last - 1), (above, below, last, 1)):
            sending, receiving = [flat[edge * stride :], 1, layout], [flat[ghost * stride :], 1, layout]
            grid.Sendrecv(sending, dest, recvbuf=receiving, source=source)
    column.Free()
    row.Free()


def applied(u):
    return 4 * u[1:-1, 1:-1] - (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:])


def total(product):
    result = np.empty(1)
    grid.Allreduce(np.array([product.sum()]), result)
    return result[0]


def solve(right):
    x, residual = np.zeros_like(right), right.copy()
    direction = np.pad(residual, 1)
    inner = direction[1:-1, 1:-1]
    norm = first = total(residual * residual)
    for step in range(MOST_STEPS):
        if norm <= TOLERANCE**2 * first:
            return x, step
        exchange(direction)
        image = applied(direction)
        length = norm / total(inner * image)
        x += length * inner
        residual -= length * image
        norm, before = total(residual * residual), norm
        inner[...] = residual + norm / before * inner
    return x, MOST_STEPS


right = np.random.default_rng(1).random((LENGTH, LENGTH))
part, steps = solve(right[part_of(grid.Get_rank())])
parts = grid.gather(part)
if grid.Get_rank() == 0:
    whole = np.empty_like(right)
    for rank, each in enumerate(parts):
        whole[part_of(rank)] = each
    print("steps:", steps)
    print("residual is small:", bool(np.linalg.norm(applied(np.pad(whole, 1)) - right) < 1e-9 * np.linalg.norm(right)))
