"""Checks `mpi4py.util.sync`: ranks take turns, count, exclude and notify each other."""

from mpi4py import MPI
from mpi4py.util.sync import Condition, Counter, Mutex, Semaphore, Sequential

comm = MPI.COMM_WORLD
size, rank = comm.size, comm.rank

counter = Counter(5, 2, comm=comm)
with Sequential(comm):
    value = next(counter)
assert comm.allgather(value) == [5 + 2 * number for number in range(size)]
counter.free()

mutex, total = Mutex(comm=comm), Counter(comm=comm)
for _ in range(20):
    with mutex:
        first = total.next()
        assert total.next() == first + 1
assert not mutex.locked()
comm.Barrier()
assert total.next(0) == 40 * size

condition = Condition(mutex)
if rank:
    with condition:
        assert condition.wait()
else:
    notified = 0
    while notified < size - 1:
        with condition:
            notified += condition.notify_all()

permits = Semaphore(1, comm=comm)
for _ in range(5):
    with permits:
        first = total.next()
        assert total.next() == first + 1
comm.Barrier()
assert comm.allreduce(permits.acquire(blocking=False)) == 1
comm.Barrier()
for resource in (permits, condition, total, mutex):
    resource.free()
try:
    mutex.acquire()
except RuntimeError:
    print(rank, "has checked everything")
