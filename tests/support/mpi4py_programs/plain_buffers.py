"""Messages and collectives with all forms of a buffer, with and without the fast path, on two ranks."""

import itertools
import mmap

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
peer = 1 - comm.rank
NUMBERS = np.arange(12, dtype=np.float64)


def unaligned(values):
    """Return the values in memory that begins one byte behind an aligned address."""
    memory = np.zeros(values.nbytes + 1, np.uint8)
    array = memory[1:].view(values.dtype)
    array[:] = values
    return array


def mapped(values):
    """Return an anonymous map that begins with the bytes of the values."""
    memory = mmap.mmap(-1, max(values.nbytes, 1))
    memory[: values.nbytes] = values.tobytes()
    return memory


# Each form makes a specification of values and returns it, with a function that reads them back.
FORMS = {
    "array": lambda x: (y := x.copy(), lambda: y),
    "table": lambda x: (y := x.reshape(3, 4).copy(), y.ravel),
    "columns": lambda x: (y := x.reshape(3, 4).copy().T, y.T.ravel),
    "unaligned": lambda x: (y := unaligned(x), lambda: y),
    "datatype": lambda x: ([y := x.copy(), MPI.DOUBLE], lambda: y),
    "count": lambda x: ([y := x.copy(), 12, MPI.DOUBLE], lambda: y),
    "code": lambda x: ([y := x.copy(), "d"], lambda: y),
    "displacement": lambda x: ([y := np.append(np.zeros(2), x), 12, 2, MPI.DOUBLE], lambda: y[2:]),
    "map": lambda x: ([y := mapped(x), 12, MPI.DOUBLE], lambda: np.frombuffer(y, np.float64, 12)),
    "bytes": lambda x: ([y := bytearray(x.tobytes()), 12, MPI.DOUBLE], lambda: np.frombuffer(y)),
}
for tag, (sent, taken) in enumerate(itertools.product(FORMS, FORMS)):
    if comm.rank == 0:
        comm.Send(FORMS[sent](NUMBERS)[0], 1, tag)
    else:
        buffer, values = FORMS[taken](np.zeros(12))
        status = MPI.Status()
        comm.Recv(buffer, 0, tag, status)
        assert (values() == NUMBERS).all(), (sent, taken)
        assert (status.source, status.tag, status.Get_count(MPI.DOUBLE)) == (0, tag, 12), (sent, taken)

# The two ranks pass different forms to the same collective.
for here, there in itertools.product(FORMS, FORMS):
    form = FORMS[here if comm.rank == 0 else there]
    buffer, values = form(NUMBERS if comm.rank == 0 else np.zeros(12))
    comm.Bcast(buffer)
    assert (values() == NUMBERS).all(), (here, there, "Bcast")
    buffer, values = form(np.zeros(12))
    comm.Allreduce(form(NUMBERS + comm.rank)[0], buffer)
    assert (values() == 2 * NUMBERS + 1).all(), (here, there, "Allreduce")
    comm.Allreduce(MPI.IN_PLACE, buffer, MPI.MAX)
    assert (values() == 2 * NUMBERS + 1).all(), (here, there, "Allreduce in place")
    gathered = np.zeros(24)
    comm.Allgather(form(NUMBERS + comm.rank)[0], gathered)
    assert (gathered == np.concatenate((NUMBERS, NUMBERS + 1))).all(), (here, there, "Allgather")
whole = bytearray(2)
comm.Allgather([bytearray([comm.rank + 1]), 1, MPI.BYTE], [whole, 1, MPI.BYTE])
assert bytes(whole) == b"\1\2"
flags = bytearray([1 << comm.rank])
comm.Allreduce(MPI.IN_PLACE, [flags, 1, MPI.BYTE], MPI.BOR)
assert bytes(flags) == b"\3"

# A receive takes a shorter message, and any source and tag.
target, status = np.full(12, 7.0), MPI.Status()
if comm.rank == 0:
    comm.Send(NUMBERS[:5], 1, 3)
    comm.Send(np.empty(0), 1, 4)
    comm.Send([NUMBERS, 0, MPI.DOUBLE], 1, 4)
else:
    comm.Recv(target, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
    assert (target[:5] == NUMBERS[:5]).all()
    assert (target[5:] == 7).all()
    assert (status.source, status.tag, status.count) == (0, 3, 40)
    for _ in range(2):
        comm.Recv(target, 0, MPI.ANY_TAG, status)
        assert (status.tag, status.count) == (4, 0)


def is_refused(call, buffer):
    """Return whether a call raises an error for a buffer."""
    try:
        call(buffer, peer, 5)
    except (ValueError, TypeError, BufferError, MPI.Exception):
        return True
    return False


# A wrong specification is an error of the rank that passes it, and nothing is sent.
if comm.rank == 0:
    for wrong in ([NUMBERS, 13, MPI.DOUBLE], [NUMBERS, -1, MPI.DOUBLE], [NUMBERS, 1, MPI.DATATYPE_NULL], [], 5):
        assert is_refused(comm.Send, wrong), f"{wrong} was sent"
    comm.Send(NUMBERS, 1, 5)
else:
    for wrong in (np.frombuffer(bytes(96)), [bytes(96), 12, MPI.DOUBLE]):
        assert is_refused(comm.Recv, wrong), f"{wrong} was received into, although it is read-only"
    comm.Recv(target, 0, 5)
    assert (target == NUMBERS).all()

# A message that is longer than the buffer is an error of the receiver.
comm.Barrier()
one = comm.Dup()
one.Set_errhandler(MPI.ERRORS_RETURN)
error_class = None
try:
    one.Send(NUMBERS, peer, 6) if comm.rank == 0 else one.Recv(np.zeros(3), 0, 6)
except MPI.Exception as error:
    error_class = error.Get_error_class()
assert error_class == (MPI.ERR_TRUNCATE if comm.rank else None), error_class
print("has checked everything")
