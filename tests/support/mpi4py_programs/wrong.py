"""A program of mpi4py whose 2 ranks disagree as the first argument says, and print the error that they get."""

import os
import sys

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank = comm.rank
out = np.zeros(8)
one_place = MPI.DOUBLE.Create_resized(0, 0)
WRONG = {
    "counts": lambda: comm.Allreduce(np.ones(3 + rank), out[: 3 + rank]),
    "types": lambda: comm.Allgather(np.ones(2, "if"[rank]), np.zeros(4, "if"[rank])),
    "order": lambda: comm.Barrier() if rank else comm.Bcast(out),
    "roots": lambda: comm.Bcast(out, root=rank),
    "operations": lambda: comm.Allreduce(np.ones(8), out, op=(MPI.SUM, MPI.MAX)[rank]),
    "shares": lambda: comm.Alltoallv([out, [1, 2]], [np.zeros(8), [[1, 1], [3, 2]][rank]]),
    "neighbours": lambda: comm.Create_cart([2]).Neighbor_allgather(np.ones(1 + rank), np.ones(4)),
    "objects": lambda: comm.bcast(1) if rank else comm.allgather(1),
    "huge": lambda: comm.Gatherv(
        np.ones(2), None if rank else [out, [2, 1 << 54], [0, 0], MPI.DOUBLE.Create_resized(0, 0)]
    ),
    "missing": lambda: rank or comm.Barrier(),
    "lost": lambda: os._exit(3) if rank else comm.Barrier(),
}
try:
    WRONG[sys.argv[1]]()
    if sys.argv[1] == "missing" and rank:
        comm.recv(source=0, tag=5)
    comm.Barrier()  # a root may have left the call before another rank finds the difference
except MPI.Exception as error:
    sys.stdout.write(f"class {error.Get_error_class()} {type(error.__cause__).__name__}: {error}\n")
