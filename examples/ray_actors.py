"""Finds the largest eigenvalue of a matrix that Ray's actors hold in blocks of rows.

The power iteration multiplies a vector by the matrix again and again. Each actor multiplies its rows, and an allgather
over the actors' communicator joins the results, without the driver and Ray's object store.
"""

from __future__ import annotations

import argparse

import numpy as np
import ray

import unisono.launchers.ray as ur


class Rows:
    """A block of rows of a symmetric matrix."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows

    def largest_eigenvalue(self, iterations: int) -> float:
        """Return the eigenvalue; all actors must call this at the same time."""
        world = ur.current("rows")
        vector = np.ones(self._rows.shape[1])
        for _ in range(iterations):
            product = world.allgather(self._rows @ vector)
            eigenvalue = float(vector @ product / (vector @ vector))
            vector = product / np.linalg.norm(product)
        return eigenvalue


def main() -> None:
    """Compute the eigenvalue, and compare it with numpy's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--size", type=int, default=200)
    options = parser.parse_args()
    half = np.random.default_rng(1).random((options.size, options.size))
    matrix = half + half.T
    ray.init(num_cpus=options.actors, include_dashboard=False, ignore_reinit_error=True)
    blocks = np.split(matrix, options.actors)
    actors = [ray.remote(num_cpus=0.5)(Rows).remote(block) for block in blocks]
    with ur.communicator(actors, name="rows"):
        results = ray.get([actor.largest_eigenvalue.remote(50) for actor in actors])
    expected = float(np.linalg.eigvalsh(matrix)[-1])
    if not np.allclose(results, expected):
        raise SystemExit(f"the actors found {results}, and numpy {expected}")
    print(f"the largest eigenvalue is {results[0]:.6f} on all {options.actors} actors, as numpy finds")


if __name__ == "__main__":
    main()
