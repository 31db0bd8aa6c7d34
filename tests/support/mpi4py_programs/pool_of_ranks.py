"""A program of `mpi4py.futures`, which prints the results of an executor, without a word about Unisono."""

import os
import sys

import numpy as np
from mpi4py.futures import BrokenExecutor, MPIPoolExecutor, as_completed, get_comm_workers

FACTOR = 3
offsets = []


def scaled(x: int) -> int:
    return FACTOR * x + sum(offsets)


def add_offset(offset: int) -> None:
    offsets.append(offset)


def place(_: int) -> int:
    return os.getpid()


def sum_of_ranks() -> int:
    comm = get_comm_workers()
    comm.Barrier()
    return comm.allreduce(comm.Get_rank())


def check() -> None:
    with MPIPoolExecutor(initializer=add_offset, initargs=(1,)) as executor:
        assert list(executor.map(scaled, range(20), chunksize=3)) == [3 * n + 1 for n in range(20)]
        assert list(executor.starmap(pow, [(2, 3), (3, 2)], buffersize=1)) == [8, 9]
        assert set(executor.map(abs, [-1, -2], unordered=True)) == {1, 2}
        workers = executor.num_workers
        assert os.getpid() not in set(executor.map(place, range(4 * workers)))
        parallel = [executor.submit(sum_of_ranks) for _ in range(workers)]
        assert [future.result() for future in parallel] == [sum(range(workers))] * workers
        large = executor.submit(np.add, np.ones(1 << 20), 1.0)
        assert (large.result() == 2).all()
        failed = executor.submit(divmod, 1, 0)
        assert [future.exception().__class__ for future in as_completed([failed])] == [ZeroDivisionError]
        assert "in run\n    return self.function" in str(failed.exception().__cause__)
        assert executor.submit(lambda: 0).exception() is not None  # it cannot be pickled
    broken = MPIPoolExecutor(initializer=divmod, initargs=(1, 0))
    assert isinstance(broken.submit(abs, 1).exception(), BrokenExecutor)
    executor = MPIPoolExecutor()
    waiting = [executor.submit(sum, range(1000)) for _ in range(200)]
    executor.shutdown(cancel_futures=True)
    assert all(future.done() for future in waiting)
    print("workers:", workers)


if __name__ == "__main__":
    check()
    sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
