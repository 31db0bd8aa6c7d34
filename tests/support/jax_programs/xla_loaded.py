"""Saves a compiled program of two processes, or loads it and prints the error that it ends with.

Arguments: "save" or "load", and a folder.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental import serialize_executable
from support.jax_programs.sharded import WORLD, add, sharded

what, folder = sys.argv[1:]
file = Path(folder, str(WORLD.rank))
x = sharded(np.arange(2.0))
if what == "save":
    file.write_bytes(pickle.dumps(serialize_executable.serialize(add.lower(x).compile())))
else:
    program = serialize_executable.deserialize_and_load(*pickle.loads(file.read_bytes()))
    try:
        jax.block_until_ready(program(x))
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        print(str(error).replace("\n", " "), flush=True)
    # Process 0 serves the others. JAX ends those that still start when it ends.
    WORLD.barrier()
