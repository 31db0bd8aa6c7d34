"""One rank of `unisono.bench.programs.shaped`: measures a byte stream and allreduces in turns, and prints the times.

Run by path as ``shaped_rank.py ADDRESS OTHER NBYTES ROUNDS ALGORITHM…``: rank 0 sends bytes from ADDRESS to rank OTHER,
the first one of another host. ALGORITHM is a name, or "auto". Unisono's variables say which rank this is.
"""

from __future__ import annotations

import ctypes
import json
import signal
import socket
import sys
import time

import numpy as np

import unisono as un

PR_SET_PDEATHSIG = 1
MEETING_S = 20.0
CHUNK_NBYTES = 1 << 20


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


def main() -> None:
    """Time the byte stream and each allreduce in every round. Rank 0 prints the seconds on the slowest rank as JSON."""
    address, other, nbytes, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    algorithms = sys.argv[5:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    world = un.init()
    array = np.zeros(nbytes // 4, np.float32)
    bare = open_bare(world, address, other)
    for name in algorithms:  # so that connections are open
        world.allreduce(array[: 1 << 20], algorithm=None if name == "auto" else name)
    times: list[list[float]] = []
    for _ in range(rounds):
        world.barrier()
        row = [stream(bare, world.rank == 0, nbytes)]
        for name in algorithms:
            array.fill(world.rank + 1)
            world.barrier()
            began = time.perf_counter()
            world.allreduce(array, out=array, algorithm=None if name == "auto" else name)
            row.append(time.perf_counter() - began)
            if not (array == world.size * (world.size + 1) / 2).all():
                raise ValueError(f"{name} gives a wrong result")
        times.append(world.allreduce(np.array(row), op="max").tolist())
    if world.rank == 0:
        sys.stdout.write(json.dumps(times))
    world.close()


if __name__ == "__main__":
    main()
