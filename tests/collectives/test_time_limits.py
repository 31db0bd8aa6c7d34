"""Time limits: invalid ones are refused everywhere, and limits beyond those of system calls mean "never"."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import unisono as un
from unisono.cli.commands import test as judging
from unisono.foundation.deadlines import Deadline
from unisono.transports.links.liveness import watch

REFUSED = (-1, -math.inf, math.nan, "5", True, 1j, np.ones(2))
ENDLESS = (10_000_000.0, 1e300, math.inf, 10**400, np.float64(1e12))
GREATER = un.Op.from_function(np.maximum)


def exchange(world: un.Communicator, limit_s: Any) -> None:
    out, other = np.empty(3), world.size - 1 - world.rank
    world.sendrecv(np.ones(3), other, out, other, timeout_s=limit_s)


# The calls with a time limit, by name. Each function takes a world and the limit.
TAKERS: dict[str, Callable[[un.Communicator, Any], Any]] = {
    "allreduce": lambda world, limit_s: world.allreduce(np.ones(3), timeout_s=limit_s),
    "barrier": lambda world, limit_s: world.barrier(timeout_s=limit_s),
    "allgather_object": lambda world, limit_s: world.allgather_object(1, timeout_s=limit_s),
    "split": lambda world, limit_s: world.split(0, timeout_s=limit_s).close(),
    "sendrecv": exchange,
    "by_function": lambda world, limit_s: world.allreduce(np.ones(3), GREATER, timeout_s=limit_s),
    "wait": lambda world, limit_s: world.allreduce(np.ones(3), wait=False).wait(limit_s),
    "wait_by_function": lambda world, limit_s: world.allreduce(np.ones(3), GREATER, wait=False).wait(limit_s),
    "synchronize": lambda world, limit_s: world.allreduce(np.ones(3), wait=False).synchronize(limit_s),
    "wait_all": lambda world, limit_s: un.wait_all([world.allreduce(np.ones(3), wait=False)], limit_s),
    "launch": lambda world, limit_s: un.launch(lambda comm: comm.rank, 1, timeout_s=limit_s),
}
TAKE_ZERO = {"wait", "wait_by_function", "synchronize", "wait_all"}


@pytest.fixture(scope="module")
def world() -> Iterator[un.Communicator]:
    with un.init() as alone:
        yield alone


@pytest.mark.parametrize("name", TAKERS)
@pytest.mark.parametrize("limit_s", REFUSED, ids=str)
def test_invalid_timeout_is_refused(world: un.Communicator, name: str, limit_s: Any) -> None:
    with pytest.raises(un.UsageError, match="timeout_s must be a"):
        TAKERS[name](world, limit_s)


@pytest.mark.parametrize("name", sorted(TAKERS.keys() - TAKE_ZERO))
def test_timeout_of_zero_is_refused_unless_the_call_can_poll(world: un.Communicator, name: str) -> None:
    with pytest.raises(un.UsageError, match="timeout_s must be a positive number"):
        TAKERS[name](world, 0)


def take_endless_limits(world: un.Communicator) -> None:
    for name, take in TAKERS.items():
        for limit_s in ENDLESS:
            if name != "launch":
                take(world, limit_s)


def test_ranks_accept_infinite_timeouts() -> None:
    endless = un.Options(timeout_s=math.inf, rendezvous_timeout_s=math.inf, heartbeat_timeout_s=math.inf)
    assert un.launch(take_endless_limits, 2, timeout_s=math.inf, options=endless) == [None, None]


def test_deadline_clamps_waits_to_values_of_system_calls() -> None:
    assert [Deadline(limit_s).remaining_s() for limit_s in (-1.0, 0.0, 1e300, math.inf)] == [0.001, 0.001, 2e6, 2e6]
    assert not Deadline(math.inf).has_passed()
    assert Deadline(0.0).has_passed()
    with pytest.raises(TimeoutError):
        Deadline(0.0).checked_remaining_s()


@pytest.mark.parametrize("limit_s", [0.1, 20.0, 900_000_000.0, math.inf])
def test_heartbeat_timeouts_are_clamped_to_values_of_the_kernel(limit_s: float) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as sock:
        watch(sock, limit_s)
        assert 1 <= sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= max(1, limit_s)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= limit_s * 1000


@pytest.mark.parametrize("text", ["nan", "inf", "0", "-1", "soon"])
def test_cli_test_refuses_a_timeout_that_is_not_finite(text: str) -> None:
    completed = CliRunner().invoke(judging.command, ["-n", "2", "--cases", "1", "--timeout", text])
    assert (completed.exit_code, "--timeout" in completed.output) == (2, True)
