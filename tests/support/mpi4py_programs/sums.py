"""A program of mpi4py that asks for sums whose bits do not depend on the algorithm."""

import sys

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD.Dup(MPI.Info.Create({"unisono_reproducible": "true"}))
x = np.random.default_rng(comm.rank).random(1000, np.float32)
total, scanned, part = np.empty_like(x), np.empty_like(x), np.empty(250, np.float32)
comm.Allreduce(x, total)
comm.Scan(x, scanned)
comm.Reduce_scatter_block(x, part)
every = np.empty((4, 1000), np.float32)
comm.Allgather(x, every)
tree = (every[0] + every[1]) + (every[2] + every[3])
assert (total == tree).all()
assert (part == tree[250 * comm.rank : 250 * (comm.rank + 1)]).all()
if comm.rank == 3:
    assert (scanned == ((every[0] + every[1]) + every[2]) + every[3]).all()
sys.stdout.write("has the bits of the tree\n")
