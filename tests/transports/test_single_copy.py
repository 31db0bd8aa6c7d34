"""Long messages between ranks of a host, which the kernel copies now and then by a single copy."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.outcomes import error_of
from support.ranks import Job

import unisono as un

# After this many calls of one length, the ranks have used slots and single copies.
CALLS = 12
COUNTS = (65_536, 300_000, 1_100_001)


def exchange(world: un.Communicator, dtype: str) -> int:
    """Return the number of calls with a result that is not exactly right."""
    wrong = 0
    me, ranks = world.rank, np.arange(world.size)
    for count in COUNTS:
        index = np.arange(count) % 13
        for call in range(CALLS):
            mine = (index + me + call).astype(dtype)
            gathered = world.allgather(mine).reshape(world.size, count)
            wrong += not all(np.array_equal(gathered[peer], (index + peer + call).astype(dtype)) for peer in ranks)
            turned = world.alltoall(np.concatenate([mine + np.asarray(peer, dtype) for peer in ranks]))
            expected = np.concatenate([(index + peer + call + me).astype(dtype) for peer in ranks])
            wrong += not np.array_equal(turned, expected)
            world.allreduce(mine, out=mine)
            wrong += not np.array_equal(mine, (world.size * (index + call) + ranks.sum()).astype(dtype))
    return wrong


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_long_messages_are_exact_with_and_without_single_copy(size: int, dtype: str) -> None:
    assert un.launch(exchange, size, dtype, options=un.Options(transports="shm"), timeout_s=120) == [0] * size


def turn_till_the_end(world: un.Communicator, say: Callable[[Any], None]) -> None:
    x = np.ones(4 << 20, np.float32)
    for _ in range(CALLS):
        world.alltoall(x)
    say("ready")
    error = ("", "")
    while not error[0]:
        error = error_of(lambda: world.alltoall(x))
    say(error)


def test_rank_killed_during_single_copies_is_a_lost_peer(tmp_path: Path) -> None:
    with Job(turn_till_the_end, 2, tmp_path, transports="shm") as job:
        job.hear_all()
        job.signal(1, signal.SIGKILL)
        ((kind, text),) = job.hear_all(but=1)
        assert kind == "PeerLostError", text
        assert "rank 1" in text
