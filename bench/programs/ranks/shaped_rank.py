"""One rank of `unisono.bench.programs.shaped`: measures a byte stream and collectives in turns, and prints the times.

Run by path as ``shaped_rank.py ADDRESS OTHER COLLECTIVE NBYTES STREAMED ROUNDS ALGORITHM…``: rank 0 sends STREAMED
bytes from ADDRESS to rank OTHER, the first one of another host. NBYTES are those of the collective's longer buffer.
ALGORITHM is a name, or "auto". Unisono's variables say which rank this is.
"""

from __future__ import annotations

import ctypes
import json
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import unisono as un

PR_SET_PDEATHSIG = 1
MEETING_S = 20.0
CHUNK_NBYTES = 1 << 20
# An idle link's token bucket is full again after this time, at 100 Mbit/s too.
REFILL_S = 0.02

Call = Callable[[Any, str | None], object]


def open_bare(world: un.Communicator, address: str, other: int) -> socket.socket | None:
    """Return this rank's end of a TCP socket between rank 0 and rank `other`; None on all other ranks."""
    port = np.zeros(1, np.int64)
    if world.rank == 0:
        with socket.create_server((address, 0)) as listener:
            listener.settimeout(MEETING_S)
            port[0] = listener.getsockname()[1]
            world.broadcast(port, root=0, out=port)
            return listener.accept()[0]
    world.broadcast(port, root=0, out=port)
    return socket.create_connection((address, int(port[0])), MEETING_S) if world.rank == other else None


def stream(bare: socket.socket | None, sends: bool, nbytes: int) -> float:
    """Move `nbytes` over the bare socket; return the seconds until the last one has arrived."""
    if bare is None:
        return 0.0
    chunk = bytearray(CHUNK_NBYTES)
    began = time.perf_counter()
    remaining = nbytes
    if sends:
        while remaining:
            remaining -= bare.send(memoryview(chunk)[:remaining])
        bare.recv(1)
    else:
        while remaining:
            remaining -= bare.recv_into(chunk, min(remaining, CHUNK_NBYTES))
        bare.sendall(b"\1")
    return time.perf_counter() - began


def prepare(world: un.Communicator, collective: str, count: int) -> tuple[Any, Any, Any, Call]:
    """Return a rank's array, the array of the result, its values, and the call; `count` elements are the longer one.

    Each rank's array holds its number plus 1.
    """
    ranks = np.arange(1, world.size + 1, dtype=np.float32)
    part = count // world.size
    x, out, short = (np.zeros(length, np.float32) for length in (count, count, part))
    everyone, total = np.repeat(ranks, part), ranks.sum()
    cases: dict[str, tuple[Any, Any, Any, Call]] = {
        "allreduce": (x, x, total, lambda x, name: world.allreduce(x, out=x, algorithm=name)),
        "reduce_scatter": (x, short, total, lambda x, name: world.reduce_scatter(x, out=short, algorithm=name)),
        "allgather": (x[:part], out, everyone, lambda x, name: world.allgather(x, out=out, algorithm=name)),
        "alltoall": (x, out, everyone, lambda x, name: world.alltoall(x, out=out, algorithm=name)),
        "broadcast": (x, x, ranks[0], lambda x, name: world.broadcast(x, out=x, algorithm=name)),
    }
    return cases[collective]


def settle(world: un.Communicator) -> None:
    """Wait until the links are idle, and all ranks are here."""
    world.barrier()
    time.sleep(REFILL_S)
    world.barrier()


def main() -> None:
    """Time the byte stream and each call in every round. Rank 0 prints the seconds on the slowest rank as JSON."""
    address, other, collective = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    nbytes, streamed, rounds = (int(word) for word in sys.argv[4:7])
    names = [None if name == "auto" else name for name in sys.argv[7:]]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    world = un.init()
    array, result, expected, call = prepare(world, collective, nbytes // 4 // world.size * world.size)
    bare = open_bare(world, address, other)
    for name in names:  # so that connections are open
        call(array, name)
    times: list[list[float]] = []
    for _ in range(rounds):
        settle(world)
        row = [stream(bare, world.rank == 0, streamed)]
        for name in names:
            result.fill(0)
            array.fill(world.rank + 1)
            settle(world)
            began = time.perf_counter()
            call(array, name)
            row.append(time.perf_counter() - began)
            if not (result == expected).all():
                raise ValueError(f"{name or 'auto'} gives a wrong result")
        times.append(world.allreduce(np.array(row), op="max").tolist())
    if world.rank == 0:
        sys.stdout.write(json.dumps(times))
    world.close()


if __name__ == "__main__":
    main()
