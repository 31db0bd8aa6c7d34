"""A program for ranks of MPI. It compares mpi.native with Unisono's algorithms for every collective."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from support.float_modes import MODES, mode

import unisono as un

BY_MPI: dict[str, Any] = {"algorithm": "mpi.native"}
NUMBERS = ("int8", "uint8", "int32", "uint64", "float32", "float64", "complex64", "complex128")
MOVED = ("bool", "float16", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "int64", "complex128")


def main() -> None:
    """Make all comparisons, and print that they were made."""
    with un.init() as world:
        for dtype in NUMBERS:
            reductions(world, dtype)
        operations(world)
        in_every_mode(world)
        for dtype in MOVED:
            moves(world, dtype)
        others(world)
        background_calls(world)
        some_ranks(world)
        counted(world)
        print(f"same on rank {world.rank}\n", end="", flush=True)


def same(world: un.Communicator, collective: str, *args: Any, **kwargs: Any) -> None:
    """Make a call by mpi.native and by Unisono, and compare the results."""
    call = getattr(world, collective)
    out = kwargs.pop("out", None)
    outs = [{} if out is None else {"out": out.copy()} for _ in range(2)]
    by_mpi, by_unisono = call(*args, **kwargs, **outs[0], **BY_MPI), call(*args, **kwargs, **outs[1])
    what = (collective, world.rank, args, by_mpi, by_unisono)
    assert (by_mpi is None) == (by_unisono is None), what
    if by_unisono is not None:
        assert by_mpi.dtype == by_unisono.dtype, what
        assert by_mpi.shape == by_unisono.shape, what
        assert (by_mpi == by_unisono).all(), what


def reductions(world: un.Communicator, dtype: Any) -> None:
    x = (np.arange(12 * world.size) % 3 + world.rank).astype(dtype)
    counts = [(1 + rank) % 3 for rank in range(world.size)]
    for collective in ("allreduce", "scan", "exscan", "reduce_scatter"):
        same(world, collective, x)
    same(world, "exscan", x, out=np.full_like(x, 7))
    same(world, "reduce", x, root=1)
    same(world, "reduce_scatterv", x[: sum(counts)], counts)


def in_every_mode(world: un.Communicator) -> None:
    """Add up subnormal numbers, with rank 0 in a floating-point mode."""
    for name in MODES:
        for count in (1, 1000):
            x = np.full(count, 1 + world.rank, np.uint32).view(np.float32)
            with mode(name if world.rank == 0 else "default"):
                total = world.allreduce(x, **BY_MPI)
            assert (total.view(np.uint32) == world.size * (world.size + 1) // 2).all(), (name, total)


def operations(world: un.Communicator) -> None:
    x = (np.arange(12) % 3 + world.rank).astype(np.int64)
    for op in ("prod", "min", "max", "band", "bor", "bxor", "land", "lor", "lxor"):
        same(world, "allreduce", x, op)
    for op in ("land", "lor", "lxor"):
        same(world, "allreduce", x % 2 == 0, op)


def moves(world: un.Communicator, dtype: Any) -> None:
    size, me = world.size, world.rank
    x = (np.arange(4 * size) + me).astype(dtype)
    counts = [(1 + rank) % 3 for rank in range(size)]
    pairs = [(me + rank) % 3 for rank in range(size)]
    same(world, "broadcast", x, 1)
    same(world, "allgather", x)
    same(world, "gather", x, 1)
    same(world, "scatter", x if me == 1 else None, 1, out=np.zeros(4, dtype))
    same(world, "alltoall", x)
    same(world, "allgatherv", x[: counts[me]], counts)
    same(world, "gatherv", x[: counts[me]], counts, 0)
    same(world, "scatterv", x[: sum(counts)] if me == 1 else None, counts, 1, out=np.zeros(counts[me], dtype))
    same(world, "alltoallv", np.arange(sum(pairs)).astype(dtype), pairs, pairs)


def others(world: un.Communicator) -> None:
    world.barrier(**BY_MPI)
    same(world, "allreduce", np.zeros(0))
    same(world, "allreduce", np.array(world.rank))
    x = np.arange(4.0)
    world.allreduce(x, out=x, **BY_MPI)
    again = world.plan("allreduce", x, out=x, **BY_MPI)
    again()
    assert (x == world.size**2 * np.arange(4.0)).all()
    again(wait=False).wait()
    assert (x == world.size**3 * np.arange(4.0)).all()


def background_calls(world: un.Communicator) -> None:
    """Start many calls by both ways and wait for them in reverse or in order; then start one that has a callback."""
    import threading

    size, ranks = world.size, world.size * (world.size - 1) // 2
    for waits in (reversed, list):
        works = [
            world.allreduce(np.full(1000, i + world.rank), wait=False, **(BY_MPI if i % 3 else {})) for i in range(12)
        ]
        for i, work in waits(list(enumerate(works))):
            assert (work.wait() == size * i + ranks).all()
    called = threading.Event()
    world.allreduce(np.ones(10), wait=False, **BY_MPI).add_done_callback(lambda _: called.set())
    assert called.wait(100)


def some_ranks(world: un.Communicator) -> None:
    """Call on communicators of some of the ranks, and not in the order in which they were created."""
    with world.split(world.rank % 2, key=-world.rank) as part, part.dup() as again, world.dup() as whole:
        for comm in (again, whole, part):
            same(comm, "allreduce", np.arange(5) + world.rank)
            same(comm, "allgather", np.arange(3.0) * world.rank)
            same(comm, "broadcast", np.arange(4) + world.rank, comm.size - 1)
        works = [comm.allreduce(np.ones(100), wait=False, **BY_MPI) for comm in (part, whole, again)]
        assert [int(work.wait()[0]) for work in works] == [part.size, world.size, part.size]
        assert "mpi.native" in {call.algorithm for call in part.stats().calls}


def counted(world: un.Communicator) -> None:
    """Check that statistics count each call of mpi.native and its bytes once."""
    with world.dup() as comm:
        for _ in range(3):
            comm.allreduce(np.ones(1000), **BY_MPI)
        comm.barrier(**BY_MPI)
        calls = {(call.collective, call.algorithm): call for call in comm.stats().calls}
        by_mpi = calls.pop(("allreduce", "mpi.native"))
        assert (by_mpi.calls, by_mpi.nbytes) == (3, 24_000), by_mpi
        assert by_mpi.seconds > 0
        assert calls.pop(("barrier", "mpi.native")).calls == 1
        assert not calls, calls


if __name__ == "__main__":
    main()
