"""A program of mpi4py that meets other jobs on 3 ranks: spawned ones, and one behind a port."""

import sys

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
parent = MPI.Comm.Get_parent()


def spawned() -> None:
    """Answer the parents, who are 3, and leave them."""
    assert parent.remote_size == 3
    total = np.zeros(1)
    parent.Allreduce(np.array([float(sys.argv[1])]), total)
    assert total[0] == 3  # the sum of the ranks 0, 1 and 2
    assert parent.recv(source=1, tag=4) == comm.rank
    merged = parent.Merge(high=True)
    assert merged.allgather(comm.rank)[3:] == list(range(comm.size))
    merged.Free()
    parent.Disconnect()
    assert MPI.Comm.Get_parent() == MPI.COMM_NULL


def spawns() -> None:
    """Spawn two programs of 1 and of 2 processes, of which the root alone knows."""
    args = [[__file__, "1"], [__file__, "10"]] if comm.rank == 1 else None
    codes: list[list[int]] = []
    child = comm.Spawn_multiple([sys.executable] * 2, args, [1, 2], root=1, errcodes=codes)
    assert (child.size, child.remote_size, codes) == (3, 3, [[0], [0, 0]])
    total = np.zeros(1)
    child.Allreduce(np.array([float(comm.rank)]), total)
    assert total[0] == 21
    if comm.rank == 1:
        for rank in range(3):
            child.send(rank, rank, tag=4)
    merged = child.Merge(high=False)
    assert merged.allgather(comm.rank)[:3] == [0, 1, 2]
    merged.Free()
    child.Disconnect()


def connects() -> None:
    """Let rank 0 accept the other two ranks at a port that it has published."""
    part = comm.Split(min(comm.rank, 1))
    service = f"unisono test {comm.bcast(MPI.Wtime())}"
    port = MPI.Open_port() if comm.rank == 0 else ""
    if comm.rank == 0:
        MPI.Publish_name(service, port)
    comm.Barrier()
    if comm.rank == 0:
        other = part.Accept(port)
        other.bcast("hello", root=MPI.ROOT)
        MPI.Unpublish_name(service, port)
        MPI.Close_port(port)
    else:
        other = part.Connect(MPI.Lookup_name(service) if part.rank == 0 else None)
        assert other.bcast(None, root=0) == "hello"
    other.Disconnect()


def fails() -> None:
    """Raise the error of the root on all ranks."""
    for wrong in (lambda: comm.Connect("nowhere"), lambda: comm.Accept("nowhere"), lambda: comm.Spawn("x", [], 0)):
        error_class = MPI.SUCCESS
        try:
            wrong()
        except MPI.Exception as error:
            error_class = error.Get_error_class()
        assert error_class in {MPI.ERR_ARG, MPI.ERR_PORT, MPI.ERR_SPAWN}


if parent != MPI.COMM_NULL:
    spawned()
else:
    spawns()
    connects()
    fails()
    sys.stdout.write("has met all jobs\n")
