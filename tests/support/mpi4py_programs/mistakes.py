"""Wrong calls on two ranks: each raises an error on the rank that makes it, sends nothing, and leaves all usable."""

import os

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
peer = 1 - comm.rank
READ_ONLY = np.frombuffer(bytes(48))
X, OUT = np.zeros(3), np.zeros(3)
alias = MPI.Intracomm(copy := comm.Dup())
copy.Free()
lasting = comm.Send_init(np.empty(0), MPI.PROC_NULL)
lasting.Start()


def vector(*layout):
    """Return a call that gathers into a buffer of two numbers of a wrong layout."""
    return lambda: comm.Allgatherv(np.zeros(1), [np.zeros(2), *layout, MPI.DOUBLE])


# By name: the call, and its error: a class of Python, or of MPI.
WRONG = {
    "rank is no number": (lambda: comm.Send(X, "1"), TypeError),
    "there is no such rank": (lambda: comm.Isend(X, 7), MPI.ERR_RANK),
    "nobody has this rank": (lambda: comm.Irecv(OUT, -5), MPI.ERR_RANK),
    "tag is no integer": (lambda: comm.Recv(OUT, peer, "x"), TypeError),
    "tag is negative": (lambda: comm.Sendrecv(X, peer, -3, OUT, peer), MPI.ERR_TAG),
    "tag is too high": (lambda: comm.send(X, peer, 1 << 40), MPI.ERR_TAG),
    "root is no integer": (lambda: comm.Bcast(X, None), TypeError),
    "there is no such root": (lambda: comm.Reduce(X, OUT, root=9), MPI.ERR_ROOT),
    "count is negative": (lambda: comm.Isend([X, -1, MPI.DOUBLE], peer), ValueError),
    "count is a float": (lambda: comm.Send([X, 1.5, MPI.DOUBLE], peer), TypeError),
    "counts are too few": (vector([1], [0]), ValueError),
    "counts are negative": (vector([1, -1], [0, 1]), ValueError),
    "displacement is outside": (vector([1, 1], [0, 5]), ValueError),
    "send buffer has gaps": (lambda: comm.Isend(np.zeros((4, 4))[:, ::2], peer), BufferError),
    "send buffer is a string": (lambda: comm.Send("abc", peer), TypeError),
    "buffer has objects": (lambda: comm.Send(np.array([1, "a"], object), peer), TypeError),
    "receive buffer is read-only": (lambda: comm.Sendrecv(X, peer, 0, READ_ONLY, peer), BufferError),
    "result is read-only": (lambda: comm.Alltoall(np.zeros(6), READ_ONLY), BufferError),
    "result is too short": (lambda: comm.Allreduce(X, np.zeros(2)), ValueError),
    "result has another dtype": (lambda: comm.Scan(X, np.zeros(3, "f4")), ValueError),
    "elements cannot be shared out": (lambda: comm.Reduce_scatter_block(X, OUT), ValueError),
    "operation is for integers": (lambda: comm.Allreduce(X, OUT, MPI.BAND), MPI.ERR_OP),
    "operation is null": (lambda: comm.Iallreduce(X, OUT, MPI.OP_NULL), MPI.ERR_OP),
    "operation is a function": (lambda: comm.Allreduce(X, OUT, max), TypeError),
    "communicator is null": (MPI.COMM_NULL.Barrier, MPI.ERR_COMM),
    "communicator has been freed": (alias.Barrier, MPI.ERR_COMM),
    "request runs already": (lasting.Start, MPI.ERR_REQUEST),
    "status is a number": (lambda: comm.Recv(None, MPI.PROC_NULL, status=5), TypeError),
}


def error_of(call):
    """Return the class of the error of a call: that of MPI, or that of Python."""
    try:
        call()
    except MPI.Exception as error:
        return error.Get_error_class()
    except Exception as error:  # noqa: BLE001  (the test compares it)
        return type(error)
    return None


for name, (call, expected) in WRONG.items():
    assert error_of(call) == expected, f"{name}: {error_of(call)} instead of {expected}"

# Ranks that share no memory all get the error, and can split themselves into parts that do.
shared = comm.Split_type(MPI.COMM_TYPE_SHARED)
shares_memory = os.environ["UNISONO_TRANSPORTS"] == "shm"
assert shared.size == (2 if shares_memory else 1)
assert error_of(lambda: MPI.Win.Allocate_shared(8, comm=comm).Free()) == (None if shares_memory else MPI.ERR_RMA_SHARED)
window = MPI.Win.Allocate_shared(8, comm=shared)
assert len(window.Shared_query(shared.size - 1)[0]) == 8
window.Free()

assert comm.allreduce(1) == 2
assert not comm.Iprobe()
print("has checked everything")
