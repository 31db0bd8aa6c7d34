"""The greatest eigenvalue of a matrix in blocks of rows, one on the GPU of each rank, by CuPy and an allgather.

    unisono run -n 2 examples/cupy_power.py

Each rank multiplies its rows by the whole vector, and the ranks gather the product. The vector is an array of
`un.empty(device=)`, which the other ranks of a host read where it lies.
"""

from __future__ import annotations

import argparse

import cupy as cp

import unisono as un


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1024, help="the rows of each rank")
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    with un.init() as world:
        device = world.local_rank % cp.cuda.runtime.getDeviceCount()
        with cp.cuda.Device(device):
            print_eigenvalue(world, device, arguments.rows, arguments.steps)


def print_eigenvalue(world: un.Communicator, device: int, rows: int, steps: int) -> None:
    """Print the eigenvalue of the matrix with the elements ``1 / (1 + abs(i - j))``."""
    n = rows * world.size
    own = cp.arange(rows * world.rank, rows * (world.rank + 1))
    matrix = 1.0 / (1.0 + cp.abs(own[:, None] - cp.arange(n)[None, :]))  # symmetric, with positive elements
    part = un.empty(rows, "float64", device=f"cuda:{device}")
    whole = un.empty(n, "float64", device=f"cuda:{device}")
    gather = world.plan("allgather", part, out=whole)
    whole.fill(1 / n**0.5)
    for _ in range(steps):
        cp.matmul(matrix, whole, out=part)
        gather()
        eigenvalue = cp.linalg.norm(whole)
        whole /= eigenvalue
    if world.rank == 0:
        print(f"the greatest eigenvalue is {float(eigenvalue):.6f}")


if __name__ == "__main__":
    main()
