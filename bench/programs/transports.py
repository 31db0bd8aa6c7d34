"""Measures ping-pong between two ranks over each transport, next to the bare libraries.

    unisono bench transports
    mpiexec -n 2 unisono bench transports --transports mpi

All ways take turns in one run of one pair of processes, so that a disturbance hits all of them. A number is half the
time of a message and its reply. UCX is compared with the core interface of ucxx over the same UCX transports. MPI is
compared with mpi4py, and must be started by MPI.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

import unisono as un
from unisono.bench import argument_types
from unisono.bench.sizes import format_size, parse_sizes

Bytes = NDArray[np.uint8]
# One ping-pong of this rank: sends the first array and receives into the second, or the other way round.
PingPong = Callable[[Bytes, Bytes], None]

_SIZES = "8,64,512,4K,16K,64K,256K,1M,4M,16M"
_MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# Unisono excludes these UCX transports by default, so ucxx is measured without them, too.
_TLS = "^cma,sysv,tcp"
_BATCH_S = 2e-3
_MOST_REPEATS = 100


def main() -> None:
    """Measure ping-pong between two ranks over each transport, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transports", default="shm,tcp,ucx")
    parser.add_argument("--sizes", default=_SIZES)
    parser.add_argument("--rounds", type=argument_types.count, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    arguments = (options.transports.split(","), parse_sizes(options.sizes), options.rounds)
    if any(name in os.environ for name in _MPI_VARIABLES):
        from mpi4py import MPI

        with un.init(mpi_comm=MPI.COMM_WORLD) as world:
            rows = measure(world, *arguments)
            if world.rank == 0:
                _show(rows, options.json)
        return
    with tempfile.TemporaryDirectory() as directory:
        _show(un.launch(measure, 2, *arguments, directory)[0], options.json)


def measure(
    world: un.Communicator, transports: list[str], sizes: tuple[int, ...], rounds: int, directory: str | None = None
) -> list[dict[str, Any]]:
    """Return a row for each size: the median and the least microseconds of a message by each library.

    Args:
        world: two ranks.
        transports: the transports of Unisono to measure, one after the other.
        sizes: bytes of the messages.
        rounds: the number of measurements of each.
        directory: the folder of the stores for each transport; without it, ranks start by MPI.
    """
    os.environ.setdefault("UCX_TLS", _TLS)
    opened = {name: _opened(world, name, directory) for name in transports}
    libraries: dict[str, PingPong] = {f"unisono {name}": _by_unisono(comm) for name, comm in opened.items()}
    libraries |= {name: make(world) for name, (transport, make) in _BARE.items() if transport in transports}
    rows = []
    for nbytes in sizes:
        source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        stopwatches = {name: _stopwatch(world, each, source, target) for name, each in libraries.items()}
        times = _in_turns(stopwatches, rounds)
        medians, least = ({name: of(each) for name, each in times.items()} for of in (median, min))
        rows.append({"nbytes": nbytes, "us": medians, "least_us": least})
    for comm in opened.values():
        comm.close()
    return rows


def _in_turns(stopwatches: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in stopwatches}
    turns = random.Random(0)  # the same on both ranks
    for _ in range(rounds):
        for name in turns.sample(list(stopwatches), len(stopwatches)):
            times[name].append(stopwatches[name]() * 1e6)
    return times


def _stopwatch(world: un.Communicator, pingpong: PingPong, source: Bytes, target: Bytes) -> Callable[[], float]:
    """Return a function that measures one ping-pong, repeated as often as a first try finds long enough."""
    pingpong(source, target)
    tried = np.array([_seconds(world, pingpong, source, target, 2)])
    slowest = float(world.allreduce(tried, op="max")[0])
    repeats = int(min(_MOST_REPEATS, max(1, _BATCH_S / slowest)))
    return lambda: _seconds(world, pingpong, source, target, repeats)


def _seconds(world: un.Communicator, pingpong: PingPong, source: Bytes, target: Bytes, repeats: int) -> float:
    world.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        pingpong(source, target)
    return (time.perf_counter() - began) / repeats / 2


def _opened(world: un.Communicator, transport: str, directory: str | None) -> un.Communicator:
    options = un.Options(transports=transport)
    if directory is None:
        from mpi4py import MPI

        return un.init(options, mpi_comm=MPI.COMM_WORLD)
    return un.init(options, store=f"file://{directory}/{transport}", rank=world.rank, size=world.size)


def _pingpong(rank: int, send: Callable[[Bytes], Any], recv: Callable[[Bytes], Any]) -> PingPong:
    """Return the ping-pong of a rank, made of a function that sends and one that receives. Rank 0 begins."""

    def first(source: Bytes, target: Bytes) -> None:
        send(source)
        recv(target)

    def second(source: Bytes, target: Bytes) -> None:
        recv(target)
        send(source)

    return first if rank == 0 else second


def _by_unisono(comm: un.Communicator) -> PingPong:
    peer = 1 - comm.rank
    return _pingpong(comm.rank, lambda source: comm.send(source, peer), lambda target: comm.recv(target, peer))


def _by_mpi4py(world: un.Communicator) -> PingPong:
    from mpi4py import MPI

    comm, peer = MPI.COMM_WORLD, 1 - world.rank
    return _pingpong(world.rank, lambda source: comm.Send(source, peer), lambda target: comm.Recv(target, peer))


def _by_ucxx(world: un.Communicator) -> PingPong:
    from ucxx._lib import arr, libucxx as ucx

    worker = ucx.UCXWorker(ucx.UCXContext({}, feature_flags=(ucx.Feature.TAG,)))
    address = np.frombuffer(worker.address.tobytes(), np.uint8)
    lengths = world.allgather(np.array([address.size]))
    both = world.allgatherv(address, counts=lengths.tolist())
    theirs = np.split(both, [lengths[0]])[1 - world.rank]
    endpoint = ucx.UCXEndpoint.create_from_worker_address(
        worker, ucx.UCXAddress.create_from_buffer(np.ascontiguousarray(theirs)), endpoint_error_handling=False
    )
    arrays: dict[int, tuple[Bytes, Any]] = {}

    def array(of: Bytes) -> Any:  # kept, because creating one takes as long as a message
        if id(of) not in arrays:
            arrays[id(of)] = of, arr.Array(of)
        return arrays[id(of)][1]

    def wait(request: Any) -> None:
        while not request.completed:
            worker.progress()
        request.check_error()

    def send(source: Bytes) -> None:
        wait(endpoint.tag_send(array(source), ucx.UCXXTag(1)))

    def recv(target: Bytes) -> None:
        wait(worker.tag_recv(array(target), ucx.UCXXTag(1), ucx.UCXXTagMaskFull))

    return _pingpong(world.rank, send, recv)


# The bare libraries: the transport of each, and the function that makes its ping-pong.
_BARE: dict[str, tuple[str, Callable[[un.Communicator], PingPong]]] = {
    "ucxx": ("ucx", _by_ucxx),
    "mpi4py": ("mpi", _by_mpi4py),
}


def _show(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return
    names = list(rows[0]["us"])
    for title, key in (("median", "us"), ("least", "least_us")):
        sys.stdout.write(f"{title} microseconds of a message, and GB/s\n")
        sys.stdout.write(f"{'bytes':>8}" + "".join(f"{name:>20}" for name in names) + "\n")
        for row in rows:
            us = row[key]
            numbers = "".join(f"{us[name]:>12.1f}{row['nbytes'] / us[name] / 1e3:>8.2f}" for name in names)
            sys.stdout.write(f"{format_size(row['nbytes']):>8}{numbers}\n")
    sys.stdout.flush()  # before a library can end the process badly


if __name__ == "__main__":
    main()
