"""A program of `mpi4py.util` and of `MPICommExecutor` on any number of ranks, without a word about Unisono."""

import numpy as np
from mpi4py import MPI
from mpi4py.futures import MPICommExecutor
from mpi4py.util import dtlib, pkl5

comm = pkl5.Intracomm(MPI.COMM_WORLD)
rank, size = comm.Get_rank(), comm.Get_size()
right, left = (rank + 1) % size, (rank - 1) % size


def objects(nbytes: int) -> None:
    mine = {"rank": rank, "array": np.full(nbytes, rank, "u1")}
    request = comm.isend(mine, right, tag=3)
    status = MPI.Status()
    received = comm.mprobe(tag=3, status=status).irecv().wait(status)
    request.wait()
    assert (received["rank"], set(received["array"]), status.source) == (left, {left}, left)
    received["array"][0] = 7  # it can be written
    assert [each["rank"] for each in comm.allgather(mine)] == list(range(size))
    assert comm.bcast(mine if rank == 0 else None)["array"].sum() == 0
    assert comm.scatter([(n, np.ones(nbytes)) for n in range(size)] if rank == 0 else None)[0] == rank
    every = comm.gather(mine, root=size - 1)
    assert every is None or [int(each["array"][-1]) for each in every] == list(range(size))
    assert [int(each[-1]) for each in comm.alltoall([np.full(nbytes, n) for n in range(size)])] == [rank] * size


def datatypes() -> None:
    dtype = np.dtype([("f0", "i4"), ("f1", "f8", (3,))], align=True)
    datatype = dtlib.from_numpy_dtype(dtype)
    assert dtlib.to_numpy_dtype(datatype) == dtype
    assert datatype.extent == dtype.itemsize
    column = MPI.DOUBLE.Create_vector(3, 1, 4)
    assert dtlib.to_numpy_dtype(column).itemsize == column.extent


def executor_of_ranks() -> None:
    with MPICommExecutor(MPI.COMM_WORLD, root=size - 1) as executor:
        assert (executor is None) == (rank != size - 1)
        if executor is not None:
            assert list(executor.map(pow, range(9), [2] * 9)) == [n * n for n in range(9)]
    assert MPI.COMM_WORLD.allreduce(1) == size  # all ranks go on together


for length in (1, 1 << 20):
    objects(length)
datatypes()
executor_of_ranks()
print("has checked everything")
