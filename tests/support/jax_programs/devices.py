"""Makes a call in a program for both devices of a process, and prints the error."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import unisono as un
import unisono.jax as uj

world = un.init()
spec = PartitionSpec("devices")
mesh = Mesh(np.array(jax.devices()), ("devices",))
call = jax.shard_map(lambda x: uj.allreduce(x, token=uj.make_token())[0], mesh=mesh, in_specs=spec, out_specs=spec)
try:
    jax.jit(call)(jnp.ones(4))
except un.UsageError as error:
    print(error.message)
world.close()
