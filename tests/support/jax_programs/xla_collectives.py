"""Checks the collectives of XLA on all processes, carried out by Unisono; prints "right"."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from support.jax_programs.sharded import MESH, WORLD, local, over, sharded

size, rank = WORLD.size, WORLD.rank


def called(x: Any) -> tuple[Any, ...]:
    return (
        jax.lax.psum(x, "i"),
        jax.lax.all_gather(x, "i", tiled=True),
        jax.lax.ppermute(x, "i", [(k, (k + 1) % size) for k in range(size)]),
        jax.lax.psum_scatter(x, "i", tiled=True),
        jax.lax.all_to_all(x.reshape(size, -1), "i", 0, 0),
        jax.lax.pmax(x, "i"),
        jax.lax.pmin(x, "i"),
    )


kinds = ("float32", "int32", "uint8", "complex64")
arrays = [np.arange(size * 24).astype(kind) for kind in kinds]
outs = (P(), P("i"), P("i"), P("i"), P("i"), P(), P())
# XLA orders no complex numbers.
calls = over(
    lambda arrays: [called(x)[: 5 if np.iscomplexobj(x) else None] for x in arrays],
    out=[outs[: 5 if kind == "complex64" else None] for kind in kinds],
)
for whole, results in zip(arrays, calls([sharded(array) for array in arrays]), strict=True):
    parts = whole.reshape(size, -1)
    total, gathered, rolled, scattered, exchanged, *extremes = map(local, results)
    assert (total == parts.sum(0).astype(whole.dtype)).all()
    assert (gathered == whole).all()
    assert (rolled == parts[(rank - 1) % size]).all()
    assert (scattered == parts.sum(0).astype(whole.dtype).reshape(size, -1)[rank]).all()
    assert (exchanged.reshape(size, -1) == parts.reshape(size, size, -1)[:, rank]).all()
    for extreme, expected in zip(extremes, (parts.max(0), parts.min(0)), strict=False):
        assert (extreme == expected).all()

# XLA adds collectives to a product of sharded matrices and to a gradient, and makes communicators of rows and columns.
square = np.arange(64.0, dtype=np.float32).reshape(8, 8)
x = np.arange(size * 4.0, dtype=np.float32)
whole = NamedSharding(MESH, P())


def program(matrix: Any, w: Any, x: Any) -> tuple[Any, Any]:
    return matrix @ matrix, jax.grad(lambda w, x: ((x * w) ** 2).sum())(w, x)


product, gradient = jax.jit(program, out_shardings=whole)(sharded(square, P("i", None)), 2.0, sharded(x))
assert np.allclose(local(product), square @ square)
assert float(gradient) == float((4.0 * x**2).sum())

if size == 4:
    grid = Mesh(np.array(jax.devices()).reshape(2, 2), ("row", "column"))
    both = P(("row", "column"))
    totals = over(lambda x: tuple(jax.lax.psum(x, axis) for axis in grid.axis_names), grid, both, (both, both))
    by_row, by_column = map(local, totals(sharded(np.arange(4.0), both, grid)))
    assert (by_row[0], by_column[0]) == ([2, 4, 2, 4][rank], [1, 1, 5, 5][rank])

print("right", flush=True)
