"""Sorts a dask array across the workers of a cluster: each worker gets a range of the values, and sorts it.

Dask has no sort of arrays, because every part of the result depends on every part of the input. A sample sort needs two
collectives: an allgather of samples, which cut the values into ranges, and an alltoall, which moves each value once
(H. Shi and J. Schaeffer, Parallel sorting by regular sampling, 1992).
"""

from __future__ import annotations

import argparse

import dask.array as da
import numpy as np
from distributed import Client, wait

import unisono as un
import unisono.launchers.dask as ud

SAMPLES = 64


def sorted_range(world: un.Communicator, part: np.ndarray) -> np.ndarray:
    """Return the sorted values of this rank's range. The ranges of the ranks follow each other."""
    part = np.sort(part)
    samples = np.sort(world.allgather(np.quantile(part, np.linspace(0, 1, SAMPLES))))
    bounds = samples[np.arange(1, world.size) * SAMPLES]
    counts = np.diff([0, *np.searchsorted(part, bounds), part.size])
    received = world.alltoall(counts)
    return np.sort(world.alltoallv(part, counts.tolist(), received.tolist()))


def main() -> None:
    """Sort random numbers, and check the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--elements", type=int, default=1_000_000)
    options = parser.parse_args()
    with Client(n_workers=options.workers, threads_per_worker=1, dashboard_address=":0") as client:
        x = da.random.default_rng(1).standard_normal(options.elements, chunks=-(-options.elements // options.workers))
        parts = client.compute(list(x.to_delayed()))
        wait(parts)
        with ud.communicator(client) as ranks:
            ranges = client.gather(ranks.submit(sorted_range, ud.of_ranks(parts)))
    result = np.concatenate(ranges)
    if result.size != options.elements or (np.diff(result) < 0).any():
        raise SystemExit("the result is not sorted")
    print(
        f"sorted {result.size:,} elements on {options.workers} workers, in ranges of {[part.size for part in ranges]}"
    )


if __name__ == "__main__":
    main()
