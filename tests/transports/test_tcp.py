"""TCP channels between processes: several streams, checksums, and a network that damages data."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.deadlines import DEADLINE_S
from support.ranks import Job

import unisono as un
from unisono.transports.links.handshake import HELLO_NBYTES

DIGEST_NBYTES = 32
COUNT = 1 << 18


class DamagingProxy:
    """Forwards connections to a listener, and flips one bit of each of the first `times` connections.

    The bit is in the byte that comes `at` bytes after the dialer's HELLO and HMAC.
    """

    def __init__(self, target: tuple[str, int], at: int, times: int) -> None:
        self._target = target
        self._at = HELLO_NBYTES + DIGEST_NBYTES + at
        self._times = times
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            dialler, _ = self._listener.accept()
            acceptor = socket.create_connection(self._target)
            at = self._at if self._times > 0 else -1
            self._times -= 1
            for ends in ((dialler, acceptor, at), (acceptor, dialler, -1)):
                threading.Thread(target=self._carry, args=ends, daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, sink: socket.socket, at: int) -> None:
        carried = 0
        try:
            while data := bytearray(source.recv(1 << 16)):
                if carried <= at < carried + len(data):
                    data[at - carried] ^= 4
                carried += len(data)
                sink.sendall(data)
        except OSError:
            pass  # one end has closed, and closing both ends tells the other
        finally:
            sink.close()
            source.close()


def reduce_over_a_damaging_network(world: un.Communicator, say: Any, at: int, times: int) -> None:
    session: Any = world._executor._session
    if world.rank == world.size - 1:
        members = list(session._members)
        for peer in range(world.rank):
            addresses = members[peer].addresses
            proxy = DamagingProxy((addresses.tcp_host, addresses.tcp_port), at, times)
            reached = dataclasses.replace(addresses, tcp_port=proxy.port)
            members[peer] = dataclasses.replace(members[peer], addresses=reached)
        session._members = tuple(members)
    try:
        for _ in range(10):
            x = np.arange(COUNT, dtype=np.float32)
            result = world.allreduce(x, algorithm="ring", timeout_s=DEADLINE_S)
            assert (result == x * world.size).all()
        say(("", "no error"))
    except un.UnisonoError as error:
        say((type(error).__name__, str(error)))


@pytest.mark.parametrize(
    ("at", "checksum", "what"),
    [
        (0, False, "a damaged header"),  # its magic number
        (16, False, "a damaged header"),  # its length
        (40, False, "a damaged header"),  # its epoch
        (64 + 1000, True, "a damaged payload"),  # also when it is sent again
    ],
)
def test_bits_flipped_by_the_network_are_an_error_on_every_rank(
    tmp_path: Path, at: int, checksum: bool, what: str
) -> None:
    options: dict[str, Any] = {"transports": "tcp", "tcp_checksum": checksum}
    with Job(reduce_over_a_damaging_network, 3, tmp_path, at, 1000, **options) as job:
        for kind, text in job.hear_all():
            assert kind == "CorruptionError", text
            assert f"from rank 2 arrived with {what}" in text


@pytest.mark.parametrize("at", [0, 40, 64 + 1000, 64 + 300_000])
def test_checked_data_that_arrives_damaged_is_sent_again(tmp_path: Path, at: int) -> None:
    with Job(reduce_over_a_damaging_network, 3, tmp_path, at, 1, transports="tcp", tcp_checksum=True) as job:
        assert job.hear_all() == [("", "no error")] * 3


def reduce_and_send(world: un.Communicator, say: Any) -> None:
    for count in (1, 1000, 70_000, 600_000, 1_000_003):
        result = world.allreduce(np.arange(count, dtype=np.float64) * (world.rank + 1))
        assert (result == np.arange(count) * 6.0).all()
    message = np.full(1_000_001, world.rank, np.uint16)
    received = np.empty_like(message)
    if world.rank == 0:
        world.send(message + 7, 1, tag=3)
    elif world.rank == 1:
        world.recv(received, 0, tag=3)
        assert (received == 7).all()
    world.barrier()
    before = open_sockets()
    world.barrier()
    # other sockets are opened and closed meanwhile, so the smaller number counts those that stay
    say(min(before, open_sockets()))


def open_sockets() -> int:
    result = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it
            result += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return result


@pytest.mark.parametrize("checksum", [False, True])
def test_several_tcp_streams_give_the_same_results_as_one(tmp_path: Path, checksum: bool) -> None:
    results = []
    for streams in (1, 4):
        (tmp_path / str(streams)).mkdir()
        options: dict[str, Any] = {"transports": "tcp", "tcp_streams": streams, "tcp_checksum": checksum}
        with Job(reduce_and_send, 3, tmp_path / str(streams), **options) as job:
            results.append(job.hear_all())
    assert all(many >= one + 3 for one, many in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [("TCP_STREAMS", "16", 16), ("TCP_CHECKSUM", "on", True), ("TCP_CHECKSUM", "0", False)],
)
def test_environment_sets_tcp_streams_and_checksums(variable: str, text: str, value: Any) -> None:
    options = un.Options.from_environment({f"UNISONO_{variable}": text})
    assert getattr(options, variable.lower()) == value


@pytest.mark.parametrize(("variable", "text"), [("TCP_STREAMS", "0"), ("TCP_STREAMS", "17"), ("TCP_CHECKSUM", "yes?")])
def test_invalid_tcp_streams_and_checksums_are_refused(variable: str, text: str) -> None:
    with pytest.raises(un.UsageError, match=f"UNISONO_{variable}"):
        un.Options.from_environment({f"UNISONO_{variable}": text})
