"""Rank 0 gives tasks to the other ranks by the pool of schwimmbad."""

import sys

from schwimmbad import MPIPool


def squared(number: int) -> int:
    """Return the square of a number."""
    return number**2


with MPIPool() as pool:
    if not pool.is_master():
        pool.wait()
        sys.exit(0)
    print(pool.size, pool.map(squared, range(40)))
