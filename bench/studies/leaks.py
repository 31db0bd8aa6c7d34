"""Measures the leaks of long use: ``unisono bench leaks [--transport shm] [--scale 1.0] [--json]``.

Two ranks open and close 10,000 communicators, make a million calls, and join and abort 1,000 jobs. After the first half
of each, and at its end, they count descriptors, threads, mappings, the bytes that C and C++ hold, and the blocks that
Python holds. A number that grows in the second half grows for ever, because caches have been filled by then. With
``--scale 0.01`` they make a hundredth of the calls.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

import unisono as un
from unisono.foundation.program import begin

RANKS = 2
_LIMIT_S = 7200.0
# The fields of glibc's structure of this name.
_MALLINFO = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class HeldResources(NamedTuple):
    """This process's numbers of descriptors, threads, mappings and Python's blocks, and bytes of malloc."""

    descriptors: int
    threads: int
    mappings: int
    blocks: int
    nbytes: int

    def since(self, before: HeldResources) -> HeldResources:
        """Return how much more this is than `before`."""
        return HeldResources(*(after - earlier for after, earlier in zip(self, before, strict=True)))


class Leak(NamedTuple):
    """The growth of resources in the second half of many repetitions of a use, on the rank where they grow more."""

    use: str
    repetitions: int
    growth: HeldResources
    seconds: float


def held() -> HeldResources:
    """Return the resources that this process holds now."""
    gc.collect()
    return HeldResources(
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        len(Path("/proc/self/maps").read_text().splitlines()),
        sys.getallocatedblocks(),
        _malloced_nbytes(),
    )


def _malloced_nbytes() -> int:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):  # musl, and glibc before 2.33
        return 0
    fields = {"_fields_": [(name, ctypes.c_size_t) for name in _MALLINFO]}
    libc.mallinfo2.restype = type("mallinfo2", (ctypes.Structure,), fields)
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def communicators(world: un.Communicator, count: int) -> None:
    """Open, use and close communicators."""
    x = np.ones(8, np.float32)
    for number in range(count):
        with world.dup() if number % 2 else world.subgroup(range(world.size)) as other:
            other.allreduce(x, out=x, op="max")
            if number % 4 == 0:
                other.barrier(wait=False).wait()


def operations(world: un.Communicator, count: int) -> None:
    """Make calls of several kinds; each round of five counts as five."""
    x, y = np.ones(64, np.float32), np.ones(100_000, np.float32)
    _start_background_thread(world)
    for number in range(count // 5):
        world.allreduce(x, out=x, op="max")
        world.broadcast(x, number % RANKS, out=x)
        world.allreduce(x, out=x, op="max", wait=False).wait()
        world.send(x, 1) if world.rank == 0 else world.recv(x, 0)
        world.allreduce(y, out=y, op="max") if number % 100 == 0 else world.barrier()


def _start_background_thread(world: un.Communicator) -> None:
    """Make a call that does not end at once: only such a call starts the thread that drives calls in the background."""
    other = (world.rank + 1) % RANKS
    late = world.recv(np.empty(1), other, wait=False)
    world.barrier()
    world.send(np.empty(1), other)
    late.wait()


def aborts(world: un.Communicator, count: int) -> None:
    """Join a job and abort it, again and again."""
    store = world.broadcast_object(f"file:///tmp/unisono-leaks-{os.getpid()}")
    x = np.ones(8, np.float32)
    for number in range(count):
        with un.init(store=store, rank=world.rank, size=world.size) as other:
            other.allreduce(x, out=x, op="max")
            if world.rank == number % RANKS:
                other.abort("on purpose")
            else:
                _call_until_aborted(other, x)


def _call_until_aborted(world: un.Communicator, x: object) -> None:
    try:
        while True:
            world.barrier()
    except un.AbortedError:
        pass


USES: dict[str, tuple[Callable[[un.Communicator, int], None], int]] = {
    "communicators": (communicators, 10_000),
    "operations": (operations, 1_000_000),
    "aborts": (aborts, 1_000),
}


def growth(world: un.Communicator, use: Callable[[un.Communicator, int], None], count: int) -> HeldResources:
    """Return by how much this rank grows in the second half of `count` repetitions of a use."""
    use(world, count // 2)
    world.barrier()
    before = held()
    use(world, count - count // 2)
    world.barrier()
    return held().since(before)


def measure(use: str, count: int, transport: str) -> Leak:
    """Return the growth of ranks that repeat a use."""
    started = time.monotonic()
    options = un.Options(transports=transport)
    growths = un.launch(growth, RANKS, USES[use][0], count, options=options, timeout_s=_LIMIT_S)
    return Leak(use, count, HeldResources(*map(max, zip(*growths, strict=True))), time.monotonic() - started)


def main() -> None:
    """Measure each use, as the command line asks, and print the growth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    leaks = [measure(use, max(2, round(options.scale * count)), options.transport) for use, (_, count) in USES.items()]
    if options.json:
        rows = [{"use": leak.use, "repetitions": leak.repetitions, **leak.growth._asdict()} for leak in leaks]
        sys.stdout.write(json.dumps(rows) + "\n")
    else:
        Console().print(table(leaks, options.transport))


def table(leaks: list[Leak], transport: str) -> Table:
    """Return the growth in the second half of each use, as a table."""
    shown = Table(
        "use", "repetitions", *HeldResources._fields, "seconds", title=f"Growth in the second half, by {transport}"
    )
    for leak in leaks:
        shown.add_row(leak.use, f"{leak.repetitions:,}", *(f"{each:,}" for each in leak.growth), f"{leak.seconds:.0f}")
    return shown


if __name__ == "__main__":
    begin()
    main()
