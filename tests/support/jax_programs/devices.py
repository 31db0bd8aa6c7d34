"""Makes a call in a program for both devices of a process, with a token and without; prints the errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from support.jax_programs.shard_maps import shard_map

import unisono as un
import unisono.jax as uj

world = un.init()
spec = PartitionSpec("devices")
mesh = Mesh(np.array(jax.devices()), ("devices",))
for call in (lambda x: uj.allreduce(x, token=uj.make_token())[0], uj.allreduce):
    try:
        jax.jit(shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec))(jnp.ones(4))
    except (un.UsageError, ValueError) as error:
        print(error)
world.close()
