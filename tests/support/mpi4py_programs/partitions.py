"""Partitioned messages on two ranks: threads that report partitions, other messages beside them, and wrong calls."""

import threading

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
peer = 1 - comm.rank
PARTS, LENGTH = 4, 3


def error_of(call, *args):
    """Return the class of the error of a call, or None."""
    try:
        call(*args)
    except MPI.Exception as error:
        return error.Get_error_class()
    except ValueError:
        return ValueError
    return None


def report(request, x, part):
    """Fill a partition, and report it."""
    x[part * LENGTH : (part + 1) * LENGTH] = part
    request.Pready(part)


# Threads fill the partitions while the main thread waits. Ordinary messages with the same tag are on their way, too.
x, out, other = np.zeros(PARTS * LENGTH), np.zeros(PARTS * LENGTH), np.zeros(1)
sending, receiving = comm.Psend_init(x, PARTS, peer, 5), comm.Precv_init(out, 2, peer, 5)
for _ in range(3):
    x[:], out[:] = -1, -1
    receiving.Start()
    assert not any(receiving.Parrived(part) for part in range(2))
    comm.Barrier()
    sending.Start()
    threads = [threading.Thread(target=report, args=(sending, x, part)) for part in range(PARTS)]
    for thread in threads:
        thread.start()
    sending.Wait()
    comm.Sendrecv(np.full(1, 7.0), peer, 5, other, MPI.ANY_SOURCE, MPI.ANY_TAG)
    status = MPI.Status()
    receiving.Wait(status)
    for thread in threads:
        thread.join()
    assert other[0] == 7
    assert (out == np.repeat(range(PARTS), LENGTH)).all(), out
    assert (status.source, status.tag, status.Get_count(MPI.DOUBLE)) == (peer, 5, PARTS * LENGTH)
    assert all(receiving.Parrived(part) for part in range(2))  # the request is inactive

# A buffer with gaps, whose values count when the last partition is ready.
columns, target = np.zeros((4, 4)), np.zeros((4, 4))
column = MPI.DOUBLE.Create_vector(4, 1, 4).Commit()
gaps, into = comm.Psend_init([columns, 1, column], 1, peer), comm.Precv_init([target, 1, column], 1, peer)
MPI.Prequest.Startall([into, gaps])
columns[:, 0] = range(4)
gaps.Pready(0)
MPI.Request.Waitall([gaps, into])
assert target[:, 0].tolist() == [0, 1, 2, 3]
assert not target[:, 1:].any()

# Nobody sends and receives partitions at once.
nobody = comm.Psend_init(x, 2, MPI.PROC_NULL)
nobody.Start()
nobody.Pready_list([1, 0])
nobody.Wait()

# Wrong calls raise an error, and leave the requests usable.
assert error_of(comm.Psend_init, x, 5, peer) is ValueError
assert error_of(comm.Psend_init, x, 0, peer) == MPI.ERR_ARG
assert error_of(comm.Precv_init, x, 2, MPI.ANY_SOURCE) == MPI.ERR_RANK
assert error_of(comm.Precv_init, x, 2, peer, MPI.ANY_TAG) == MPI.ERR_TAG
assert error_of(comm.Psend_init, x, 2, peer, 1 << 30) == MPI.ERR_TAG
assert error_of(sending.Pready, 0) == MPI.ERR_ARG  # it has not been started
sending.Pready_list([])  # no partition starts nothing
sending.Start()
assert error_of(sending.Start) == MPI.ERR_REQUEST
assert error_of(sending.Parrived, 0) == MPI.ERR_REQUEST
assert error_of(receiving.Pready, 0) == MPI.ERR_REQUEST
assert error_of(sending.Pready, PARTS) == MPI.ERR_ARG
sending.Pready_range(0, 1)
assert error_of(sending.Pready, 1) == MPI.ERR_ARG  # it is ready already
receiving.Start()
sending.Pready_range(2, PARTS - 1)
MPI.Request.Waitall([sending, receiving])
assert (out == x).all()
for request in (sending, receiving, gaps, into, nobody):
    request.Free()
print("has checked everything")
