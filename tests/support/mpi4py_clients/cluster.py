"""Rank 0 is the scheduler of Dask and rank 1 its client; the other ranks are workers."""

from dask_mpi import initialize
from distributed import Client


def squared(number: int) -> int:
    """Return the square of a number."""
    return number**2


if __name__ == "__main__":
    initialize(interface="lo", dashboard=False)
    with Client() as client:
        client.wait_for_workers(2)
        print(sorted(client.gather(client.map(squared, range(20)))))
