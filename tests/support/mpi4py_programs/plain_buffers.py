"""Messages and collectives with all forms of a buffer, with and without the fast path, on two ranks."""

import itertools
import mmap
import time

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


def moved(form, start):
    """Return the values that a call has moved from a buffer of one form to another one."""
    buffer, values = form(np.zeros(12))
    start(buffer)
    return values()


# Requests, and the collectives that have one buffer for each rank.
MINE, THEIRS = NUMBERS + comm.rank, NUMBERS + peer
SUM = MINE + THEIRS
for here, there in itertools.product(FORMS, FORMS):
    form = FORMS[here if comm.rank == 0 else there]
    out = form(MINE)[0]
    lasting = [comm.Send_init(out, peer, 8)]

    def exchange(into, out=out):
        requests = [comm.Irecv(into, peer, 7), comm.Isend(out, peer, 7)]
        MPI.Request.Waitall(requests)

    def exchange_again(into, lasting=lasting):
        requests = [*lasting, comm.Recv_init(into, peer, 8)]
        for _ in range(2):
            MPI.Prequest.Startall(requests)
            while not MPI.Request.Testall(requests):
                pass

    CALLS = {
        "Waitall": (exchange, THEIRS),
        "Startall": (exchange_again, THEIRS),
        "Sendrecv": (lambda into, out=out: comm.Sendrecv(out, peer, 9, into, peer, 9), THEIRS),
        "Isendrecv": (lambda into, out=out: comm.Isendrecv(out, peer, 9, into, peer, 9).Wait(), THEIRS),
        "Iallreduce": (lambda into, out=out: comm.Iallreduce(out, into).Wait(), SUM),
        "Reduce": (lambda into, out=out: comm.Reduce(out, into, root=1), SUM if comm.rank else 0),
        "Scan": (lambda into, out=out: comm.Scan(out, into), SUM if comm.rank else MINE),
        "Exscan": (lambda into, out=out: comm.Exscan(out, into), THEIRS if comm.rank else 0),
        "Ibcast": (lambda into, out=out: comm.Ibcast(out if comm.rank == 0 else into).Wait(), THEIRS * comm.rank),
    }
    for name, (call, expected) in CALLS.items():
        assert (moved(form, call) == expected).all(), (here, there, name)

# Calls whose one buffer has elements for each rank. A count is for each of them.
HALF, BOTH = np.arange(6) + 10.0 * comm.rank, np.concatenate((np.arange(6.0), np.arange(6) + 10.0))
TWICE = {
    "array": lambda x: x,
    "datatype": lambda x: [x, MPI.DOUBLE],
    "count": lambda x: [x, x.size // 2, MPI.DOUBLE],
    "code": lambda x: [x, x.size // 2, "d"],
}
for here, there in itertools.product(TWICE, TWICE):
    form = TWICE[here if comm.rank == 0 else there]
    half, both = np.zeros(6), np.zeros(12)
    comm.Gather(HALF, form(both) if comm.rank == 0 else None)
    assert (both == BOTH * (comm.rank == 0)).all(), (here, there, "Gather")
    comm.Scatter(form(BOTH.copy()) if comm.rank == 1 else None, half, root=1)
    assert (half == HALF).all(), (here, there, "Scatter")
    comm.Alltoall(form(BOTH + comm.rank), form(both))
    assert (both.reshape(2, 6) == HALF + np.array([[0], [1]])).all(), (here, there, "Alltoall")
    comm.Reduce_scatter_block(form(BOTH.copy()), half)
    assert (half == 2 * HALF).all(), (here, there, "Reduce_scatter_block")
    comm.Igather(HALF, form(both) if comm.rank == 0 else None).Wait()
    comm.Ialltoall(form(BOTH + comm.rank), form(both)).Wait()
    assert (both.reshape(2, 6) == HALF + np.array([[0], [1]])).all(), (here, there, "Ialltoall")
    both[:] = np.where(np.repeat([True, False], 6) == (comm.rank == 0), BOTH, 0)
    comm.Allgather(MPI.IN_PLACE, form(both))
    assert (both == BOTH).all(), (here, there, "Allgather in place")
    comm.Alltoall(MPI.IN_PLACE, form(both))
    assert (both.reshape(2, 6) == HALF).all(), (here, there, "Alltoall in place")
    both[:] = BOTH
    comm.Reduce_scatter_block(MPI.IN_PLACE, form(both))
    assert (both[:6] == 2 * HALF).all(), (here, there, "Reduce_scatter_block in place")
both = BOTH.copy()
comm.Scan(MPI.IN_PLACE, both)
assert (both == BOTH * (comm.rank + 1)).all()

# Elements of unequal numbers for each rank, one right behind the other or with a gap.
UNEQUAL, STARTS = [5, 2], [0, 5]
mine = np.arange(UNEQUAL[comm.rank]) + 10.0 * comm.rank
VECTORS = {
    "counts": (lambda x: [x, UNEQUAL, MPI.DOUBLE], 7),
    "displacements": (lambda x: [x, UNEQUAL, STARTS, MPI.DOUBLE], 7),
    "pair": (lambda x: [x, (UNEQUAL, STARTS), MPI.DOUBLE], 7),
    "code": (lambda x: [x, UNEQUAL, STARTS, "d"], 7),
    "array of counts": (lambda x: [x, np.array(UNEQUAL), np.array(STARTS), MPI.DOUBLE], 7),
    "gap": (lambda x: [x, UNEQUAL, [0, 6], MPI.DOUBLE], 8),
    "bytes": (lambda x: [x, [40, 16], MPI.BYTE], 7),
}
for here, there in itertools.product(VECTORS, VECTORS):
    name = here if comm.rank == 0 else there
    form, length = VECTORS[name]
    own = [mine, MPI.BYTE] if "bytes" in {here, there} else mine
    if {here, there} == {"bytes"} or "bytes" not in {here, there}:  # all ranks must pass the same dtype
        all_of = np.zeros(length)
        comm.Allgatherv(own, form(all_of))
        assert all_of[all_of > 0].tolist() == [1, 2, 3, 4, 10, 11], (here, there)
        comm.Scatterv(form(all_of) if comm.rank == 0 else None, own, 0)
        assert (mine == np.arange(UNEQUAL[comm.rank]) + 10.0 * comm.rank).all(), (here, there)
        again = np.zeros(length)
        comm.Gatherv(own, form(again) if comm.rank == 1 else None, 1)
        assert (again == all_of * comm.rank).all(), (here, there)
        comm.Allgatherv(MPI.IN_PLACE, form(all_of))
        assert all_of[all_of > 0].tolist() == [1, 2, 3, 4, 10, 11], (here, there)
counts = [[1, 2], [2, 3]][comm.rank]
out = np.zeros(sum(counts))
comm.Alltoallv([np.arange(float(sum(counts))), counts, MPI.DOUBLE], [out, counts, MPI.DOUBLE])
assert out.tolist() == ([0, 0, 1] if comm.rank == 0 else [1, 2, 2, 3, 4])
comm.Alltoallv(MPI.IN_PLACE, [out, counts, MPI.DOUBLE])
assert out.tolist() == ([0, 1, 2] if comm.rank == 0 else [0, 1, 2, 3, 4])

# A call whose request is dropped or freed goes on.
big = np.full(1 << 17, comm.rank)
for number in range(20):
    comm.Isend(big + number, peer, number)
target, status = np.zeros(3), MPI.Status()
comm.Irecv(target, peer, 30).Free()
comm.Ssend(NUMBERS[1:4], peer, 30)
comm.Barrier()
assert (target == NUMBERS[1:4]).all()
for number in range(20):
    comm.Recv(big, MPI.ANY_SOURCE, number, status)
    assert (big == peer + number).all(), number
    assert (status.source, status.tag, status.count) == (peer, number, big.nbytes)

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

# The end of a chain receives from nobody, and waits for the next rank as long as it takes.
LONG = np.arange(1 << 20, dtype=float)
for call in (comm.Sendrecv, lambda *args: comm.Isendrecv(*args).Wait()):
    if comm.rank == 0:
        call(LONG, 1, 7, np.empty(3), MPI.PROC_NULL)
    else:
        time.sleep(0.1)
        received = np.empty_like(LONG)
        call(LONG, MPI.PROC_NULL, 7, received, 0)
        assert (received == LONG).all()

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
