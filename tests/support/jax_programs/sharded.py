"""Arrays that XLA shards over all processes, and programs on them, whose collectives Unisono carries out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from support.jax_programs.shard_maps import shard_map

import unisono.jax as uj

WORLD = uj.use_for_xla()
MESH = Mesh(np.array(jax.devices()), ("i",))
PARTS = P("i")


def sharded(whole: Any, spec: Any = PARTS, mesh: Mesh = MESH) -> Any:
    return jax.make_array_from_callback(whole.shape, NamedSharding(mesh, spec), lambda index: whole[index])


def local(array: Any) -> Any:
    """Return the part of an array that this process has."""
    return np.asarray(array.addressable_data(0))


def over(fn: Callable[..., Any], mesh: Mesh = MESH, spec: Any = PARTS, out: Any = PARTS) -> Callable[..., Any]:
    """Return a compiled program that runs `fn` on the parts of all processes."""
    return jax.jit(shard_map(fn, mesh=mesh, in_specs=spec, out_specs=out))  # type: ignore[no-any-return]


add: Callable[..., Any] = over(lambda x: jax.lax.psum(x, "i"), out=P())
gather: Callable[..., Any] = over(partial(jax.lax.all_gather, axis_name="i"))
