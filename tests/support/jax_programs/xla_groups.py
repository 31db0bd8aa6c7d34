"""Runs programs of XLA on groups of devices that only some of the four processes use; prints "right"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from support.jax_programs.shard_maps import shard_map
from support.jax_programs.sharded import PARTS, WORLD, local, sharded

rank = WORLD.rank
devices = jax.devices()


def sum_over(chosen: Sequence[int], groups: Sequence[Sequence[int]] | None = None) -> Any:
    """Return what this process gets in a sum of the numbers of its devices, from 1 on, over groups of positions."""
    mesh = Mesh(np.array([devices[index] for index in chosen]), ("i",))
    numbers = np.array(chosen) + 1.0
    add = partial(jax.lax.psum, axis_name="i", axis_index_groups=groups)
    return float(local(unchecked(add, mesh)(sharded(numbers, PARTS, mesh)))[0])


def unchecked(fn: Callable[..., Any], mesh: Mesh, spec: Any = PARTS) -> Callable[..., Any]:
    check = {"check_vma": False} if hasattr(jax, "shard_map") else {}
    return jax.jit(shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, **check))  # type: ignore[no-any-return]


# Programs of some processes, between programs of all.
if rank < 2:
    assert sum_over([0, 1]) == 3
assert sum_over([0, 1, 2, 3]) == 10
if rank < 2:
    assert sum_over([1, 0]) == 3
else:
    assert sum_over([2, 3]) == 7
if rank:
    assert sum_over([3, 1, 2]) == 9
assert sum_over([3, 0, 2, 1]) == 10

# Groups that some processes know already.
assert sum_over([0, 1, 2, 3], [[0, 3], [1, 2]]) == 5
assert sum_over([0, 1, 2, 3], [[0, 2], [3, 1]]) == [4, 6][rank % 2]
assert sum_over([0, 1, 2, 3], [[0, 2], [1, 3]]) == [4, 6][rank % 2]
assert sum_over([0, 1, 2, 3], [[2], [0, 1, 3]]) == (3 if rank == 2 else 7)

# Several groups in a program, while the context names a mesh.
grid = Mesh(np.array(devices).reshape(2, 2), ("x", "y"))
both = P(("x", "y"))


def all_of_them(x: Any) -> Any:
    return jax.lax.psum(x, "y") + 10 * jax.lax.psum(x, "x") + 100 * jax.lax.psum(x, ("x", "y"))


totals = unchecked(all_of_them, grid, both)
with jax.set_mesh(grid) if hasattr(jax, "set_mesh") else grid:
    result = float(local(totals(sharded(np.arange(1.0, 5.0), both, grid)))[0])
assert result == 1000 + 10 * [4, 6, 4, 6][rank] + [3, 3, 7, 7][rank]

# Collectives that XLA adds, with groups in all forms of its texts.
whole = np.arange(256, dtype=np.float32).reshape(16, 16)
for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
    mesh = Mesh(np.array(devices)[order].reshape(2, 2), ("x", "y"))
    for a, b, out in (
        (P("x", "y"), P("y", "x"), P()),
        (P(("y", "x")), P(None, "x"), P("y")),
        (P(("x", "y"), None), P("y", None), P(None, ("y", "x"))),
    ):
        multiply = jax.jit(lambda a, b: a @ b.T, out_shardings=NamedSharding(mesh, out))
        product = multiply(sharded(whole, a, mesh), sharded(whole, b, mesh))
        part = product.addressable_shards[0]
        assert np.array_equal(np.asarray(part.data), (whole @ whole.T)[part.index])

print("right", flush=True)
