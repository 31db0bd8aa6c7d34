"""The sockets on which ranks listen, by transport: one for TCP and one for their host.

Both authenticate who connects.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.deadlines import DEADLINE_S
from support.hosts import Hosts, needs_namespaces
from support.programs import by_launcher
from support.ranks import Job, require, start_ranks

import unisono as un
from unisono.bench.namespaces import address, network
from unisono.transports.host.listening_ports import listening

pytestmark = pytest.mark.timeout(120)

# The MPI libraries that listen on further sockets, and the part of each library that opens them.
OF_LIBRARIES = {
    "openmpi": "Open MPI's btl/tcp, on all interfaces",
    "mpich": "the UCX in MPICH, and its launcher's port",
}
# UCX accepts this message from any process that connects. It kills a rank that listens by UCX's TCP.
DEADLY = struct.pack("<QBI", 0xCAFEBABE12345678, 10, 0)


def sockets(world: un.Communicator) -> dict[str, Any]:
    """Exchange messages of all kinds.

    Return this rank's own listening sockets, and all listening sockets of the process.
    """
    world.allreduce(np.ones(100_000), wait=False).wait(timeout_s=DEADLINE_S)
    world.allgather_object("an object")
    if world.rank < 2:
        world.sendrecv(np.ones(3), 1 - world.rank, np.empty(3), 1 - world.rank)
    world.split(world.rank % 2).barrier()
    mine = world._for_objects()._executor.session.addresses  # type: ignore[attr-defined]
    return {
        "own": {f"{mine.tcp_host}:{mine.tcp_port}"},
        "tcp": set(listening()),
        "unix": unix_names() - {mine.unix},
        "udp": bound_udp(),
    }


def rows_of_this_process(table: str, column: int) -> list[list[str]]:
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    inodes = {os.readlink(link) for link in links if link.is_symlink()}
    rows = [line.split() for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]]
    return [row for row in rows if f"socket:[{row[column]}]" in inodes]


def unix_names() -> set[str]:
    """Return the names of the Unix sockets on which this process listens, without the @ of abstract ones."""
    listens = "00010000"
    return {row[-1].removeprefix("@") for row in rows_of_this_process("unix", 6) if row[3] == listens}


def bound_udp() -> set[str]:
    return {row[1] for table in ("udp", "udp6") for row in rows_of_this_process(table, 9)}


@pytest.mark.parametrize("transports", ["shm", "tcp", "ucx", "ucx_core", "shm,ucx"])
def test_rank_listens_on_its_own_two_sockets_only(transports: str) -> None:
    if "ucx" in transports:
        require("ucx")
    for seen in un.launch(sockets, 3, options=un.Options(transports=transports), timeout_s=DEADLINE_S):
        assert seen["own"] == seen["tcp"]
        assert {end.rpartition(":")[0] for end in seen["tcp"]} == {"127.0.0.1"}
        assert seen["unix"] == seen["udp"] == set()


@pytest.mark.parametrize("library", OF_LIBRARIES)
def test_rank_of_mpi_listens_on_one_socket_beside_those_of_the_library(library: str) -> None:
    with start_ranks(2, library) as ranks:
        for seen in ranks.run_calls(sockets):
            assert seen["own"] < seen["tcp"], OF_LIBRARIES[library]
            assert {end.rpartition(":")[0] for end in seen["own"]} == {"127.0.0.1"}
            assert not any("unisono" in name for name in seen["unix"])


def sum_again(world: un.Communicator) -> float:
    return float(world.allreduce(np.ones(1000)).sum())


@pytest.mark.parametrize("transports", ["tcp", "ucx", "ucx_core"])
def test_stranger_cannot_crash_a_rank_through_the_ports_of_ucx(transports: str) -> None:
    require("ucx")
    with start_ranks(2, transports) as ranks:
        ports = {place for seen in ranks.run_calls(sockets) for place in seen["tcp"]}
        for place in ports:
            host, _, port = place.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as stranger:
                stranger.sendall(DEADLY)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b""  # the listener refused the connection
        assert ranks.run_calls(sum_again) == [2000.0] * 2


TOLD = """
import unisono as un
from unisono.transports.host.listening_ports import listening
with un.init(un.Options(transports="{transports}")) as world:
    world.barrier()
    print("ports", len(listening()))
"""


@pytest.mark.parametrize("transports", ["ucx", "ucx_core"])
def test_ranks_warn_when_settings_make_ucx_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transports: str
) -> None:
    require("ucx")
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    done = by_launcher(TOLD.format(transports=transports), tmp_path)
    assert done.stdout.count("ports 2") == 2, done.stderr
    assert done.stderr.count("UCX listens on 127.0.0.1:") == 2
    assert "does not check who connects" in done.stderr


def listening_between_hosts(world: un.Communicator, say: Any) -> None:
    say((sockets(world), sorted({traffic.transport for traffic in world.stats().values()})))
    world.barrier()


@needs_namespaces
@pytest.mark.parametrize(
    ("transports", "carrier", "ports"),
    [("shm,ucx", "ucx", 1), ("shm,ucx,tcp", "tcp", 0)],
)
def test_ucx_listens_between_hosts_only_when_tcp_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transports: str, carrier: str, ports: int
) -> None:
    require("ucx")
    monkeypatch.setenv("UCX_SHM_DEVICES", "none")  # these hosts share one memory
    with (
        network(2) as namespaces,
        Job(listening_between_hosts, Hosts(namespaces, [1, 1]), tmp_path, transports=transports) as job,
    ):
        for rank, (seen, carriers) in enumerate(job.hear_all()):
            assert carriers == [carrier]
            others = seen["tcp"] - seen["own"]
            assert len(others) == ports
            assert {end.rpartition(":")[0] for end in seen["tcp"]} == {address(rank)}
