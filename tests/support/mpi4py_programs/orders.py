"""A program of mpi4py whose 2 ranks use two communicators of the same ranks in another order."""

import sys

from mpi4py import MPI

comm = MPI.COMM_WORLD
first, second = comm.Dup(), comm.Dup()
if comm.rank == 0:
    first.send("first", 1)
    second.send("second", 1)
else:
    assert second.recv() == "second"
    assert first.recv() == "first"
sys.stdout.write("has kept the order\n")
