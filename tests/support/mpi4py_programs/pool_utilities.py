"""Checks `mpi4py.util.pool` by a pool of threads on each rank."""

from mpi4py import MPI
from mpi4py.util.pool import Pool, ThreadPool


def divided(number: int, other: int) -> int:
    """Return a quotient."""
    return number // other


with ThreadPool(2) as pool:
    assert isinstance(pool, Pool)
    assert pool.map(abs, range(-9, 1)) == list(range(9, -1, -1))
    assert pool.map(abs, []) == []
    assert list(pool.imap(abs, [-1, -2], chunksize=2)) == [1, 2]
    assert sorted(pool.imap_unordered(abs, [-1, -2])) == [1, 2]
    assert pool.starmap(divided, [(6, 3), (8, 2)], chunksize=1) == [2, 4]
    ends: list[object] = []
    failing = pool.starmap_async(divided, [(1, 0)], callback=ends.append, error_callback=ends.append)
    failing.wait()
    assert not failing.successful()
    assert isinstance(ends[0], ZeroDivisionError)
    assert pool.apply_async(divided, (9,), {"other": 3}, callback=ends.append).get(60) == 3
    assert ends[1:] == [3]
print(MPI.COMM_WORLD.rank, "has checked everything")
