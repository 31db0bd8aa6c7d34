"""Prints the processor time in µs of each call of mpi4py with 8 bytes for each rank: least of several series.

    unisono run -n 2 --no-label --mpi4py tests/support/mpi4py_clients/call_times.py
    mpiexec -n 2 python tests/support/mpi4py_clients/call_times.py

In a world of one rank, messages go to the rank itself, and calls that would wait for it are left out.
"""

import sys
import time

import numpy as np
from mpi4py import MPI

SERIES, CALLS = 7, 500
comm = MPI.COMM_WORLD
size, rank = comm.size, comm.rank
right, left = (rank + 1) % size, (rank - 1) % size
x, out = np.full(1, rank, np.float64), np.zeros(1)
many, all_out = np.arange(size, dtype=np.float64), np.zeros(size)
ones, displs = [1] * size, list(range(size))


def exchange():
    """Send and receive by requests that are waited for together."""
    MPI.Request.Waitall([comm.Irecv(out, left), comm.Isend(x, right)])


def one_by_one():
    """Send and receive by requests that are waited for one by one."""
    receiving, sending = comm.Irecv(out, left), comm.Isend(x, right)
    sending.Wait()
    receiving.Wait()


def tested():
    """Send and receive by requests that are tested."""
    receiving, sending = comm.Irecv(out, left), comm.Isend(x, right)
    while not receiving.Test():
        pass
    sending.Wait()


def ping_pong():
    """Send to the other rank, and receive its answer."""
    if rank == 0:
        comm.Send(x, 1)
        comm.Recv(out, 1)
    elif rank == 1:
        comm.Recv(out, 0)
        comm.Send(x, 0)


lasting = [comm.Recv_init(out, left), comm.Send_init(x, right)]


def persistent():
    """Start two persistent requests, and wait for them."""
    MPI.Prequest.Startall(lasting)
    MPI.Request.Waitall(lasting)


CALLS_BY_NAME = {
    **({"Send, Recv (round trip)": ping_pong} if size == 2 else {}),
    "Irecv, Isend, Waitall": exchange,
    "Irecv, Isend, Wait, Wait": one_by_one,
    "Irecv, Isend, Test, Wait": tested,
    "Sendrecv": lambda: comm.Sendrecv(x, right, 0, out, left),
    "Startall, Waitall": persistent,
    "Barrier": comm.Barrier,
    "Bcast": lambda: comm.Bcast(x),
    "Reduce": lambda: comm.Reduce(x, out),
    "Allreduce": lambda: comm.Allreduce(x, out),
    "Gather": lambda: comm.Gather(x, all_out),
    "Scatter": lambda: comm.Scatter(many, out),
    "Allgather": lambda: comm.Allgather(x, all_out),
    "Alltoall": lambda: comm.Alltoall(many, all_out),
    "Reduce_scatter_block": lambda: comm.Reduce_scatter_block(many, out),
    "Scan": lambda: comm.Scan(x, out),
    "Exscan": lambda: comm.Exscan(x, out),
    "Ibarrier, Wait": lambda: comm.Ibarrier().Wait(),
    "Ibcast, Wait": lambda: comm.Ibcast(x).Wait(),
    "Iallreduce, Wait": lambda: comm.Iallreduce(x, out).Wait(),
    "Iallgather, Wait": lambda: comm.Iallgather(x, all_out).Wait(),
    "Gatherv": lambda: comm.Gatherv(x, [all_out, ones, displs, MPI.DOUBLE]),
    "Scatterv": lambda: comm.Scatterv([many, ones, displs, MPI.DOUBLE], out),
    "Allgatherv": lambda: comm.Allgatherv(x, [all_out, ones, displs, MPI.DOUBLE]),
    "Alltoallv": lambda: comm.Alltoallv([many, ones, displs, MPI.DOUBLE], [all_out, ones, displs, MPI.DOUBLE]),
}
names = [name for name in CALLS_BY_NAME if not sys.argv[1:] or any(part in name for part in sys.argv[1:])]
least = dict.fromkeys(names, float("inf"))
for _ in range(SERIES):
    for name in names:
        call = CALLS_BY_NAME[name]
        comm.Barrier()
        began = time.process_time()
        for _ in range(CALLS):
            call()
        least[name] = min(least[name], (time.process_time() - began) / CALLS * 1e6)
for name in names:
    slowest = comm.reduce(least[name], MPI.MAX)
    if rank == 0:
        print(f"{name:28} {slowest:8.2f}", flush=True)
