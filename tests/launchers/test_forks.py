"""The open files and memory of a child that a rank forks: a new process would have no fewer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.deadlines import DEADLINE_S
from support.ports import free_port
from support.ranks import Job

import unisono as un
from unisono.launchers.launch import Pool

Say = Callable[[Any], None]
COUNT = 200_000


def held() -> set[str]:
    """Return the names that the kernel gives to the open descriptors of this process."""
    names = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the folder itself
            names.add(os.readlink(f"/proc/self/fd/{name}"))
    return names


def shared_mappings() -> list[str]:
    """Return the lines of this process's memory map that are shared memory of Unisono."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "/memfd:unisono" in line and line.split()[1].endswith("s")]


def use_everything(world: un.Communicator) -> tuple[Any, Any]:
    """Open channels of all kinds; return an array that peers can map, and a background call."""
    neighbour = (world.rank + 1) % world.size
    x = un.empty(COUNT, "f8")
    x[:] = 1
    world.allreduce(x, out=x)
    sending = world.send(np.ones(COUNT), neighbour, wait=False)
    world.recv(np.ones(COUNT), (world.rank - 1) % world.size)
    sending.wait()
    with world.split(0) as part:
        part.barrier()
    return x, world.allreduce(np.ones(4), wait=False)


def fork_while_everything_is_open(world: un.Communicator, say: Say, store: str, transports: str) -> None:
    world.close()
    before = held()
    other = un.init(un.Options(transports=transports), store=store, rank=world.rank, size=world.size)
    x, work = use_everything(other)
    reader, writer = os.pipe()
    ours = os.readlink(f"/proc/self/fd/{writer}")
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            result = (held() - before - {ours}, shared_mappings(), float(x[COUNT // 2]), refusals(other))
            os.write(writer, repr(result).encode())
            other.close()
            del other, x, work
            code = 0
        os._exit(code)
    os.close(writer)
    with open(reader) as pipe:
        result = pipe.read()
    say((result, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    work.wait()
    say(float(other.allreduce(x)[0]))
    other.close()


def refusals(world: un.Communicator) -> int:
    """Return the number of calls that are refused in a forked child."""
    refused = 0
    for call in (world.barrier, lambda: world.abort("why"), world.dup):
        try:
            call()
        except un.UsageError:
            refused += 1
    return refused


@pytest.mark.parametrize("transports", ["shm", "tcp"])
@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_forked_child_of_a_rank_keeps_no_open_files_or_shared_memory(
    tmp_path: Path, scheme: str, transports: str
) -> None:
    store = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/other"
    with Job(fork_while_everything_is_open, 3, tmp_path, store, transports) as job:
        assert job.hear_all() == [("(set(), [], 3.0, 3)", 0)] * 3
        assert job.hear_all() == [9.0] * 3


def held_by_a_child() -> set[str]:
    reader, writer = os.pipe()
    ours = os.readlink(f"/proc/self/fd/{writer}")
    child = os.fork()
    if child == 0:
        os.write(writer, "\n".join(held() - {ours}).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader) as pipe:
        return set(pipe.read().splitlines())


@pytest.mark.usefixtures("started_ranks_of_pools")
def test_forked_child_of_a_pool_keeps_no_open_files_and_pool_still_works() -> None:
    before = held()
    with Pool(2) as pool:
        ranks = pool.run(lambda comm: os.getpid(), timeout_s=DEADLINE_S)
        assert held_by_a_child() <= before < held()
        assert pool.run(lambda comm: os.getpid(), timeout_s=DEADLINE_S) == ranks
