"""The addresses on which ranks listen: by address, host name, interface and network, of IPv4 and IPv6."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ports import free_port
from support.ranks import Job

import unisono as un
from unisono.errors import RendezvousError, UsageError
from unisono.transports.host.bind_address import address_for
from unisono.transports.host.host_discovery import Surroundings
from unisono.transports.links.listener import Addresses
from unisono.transports.rendezvous.roster import RosterMember, entry_of, roster_of, roster_record


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 on its loopback interface")
WAYS = [
    ("127.0.0.1", "127.0.0.1"),
    ("lo", "127.0.0.1"),
    ("127.0.0.0/8", "127.0.0.1"),
    pytest.param("::1", "::1", marks=needs_ipv6),
    pytest.param("::1/128", "::1", marks=needs_ipv6),
]


@pytest.mark.parametrize(("option", "address"), WAYS)
def test_bind_address_may_be_an_address_an_interface_or_a_network(option: str, address: str) -> None:
    assert address_for(option) == address


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("203.0.113.0/24", "this machine has no address in it, but lo 127.0.0.1"),
        ("10.0.0.0/33", "write a network as"),
        ("nonsense/8", "write a network as"),
        ("eth99", "it must be an address, a host name, an interface or a network of this machine: lo 127.0.0.1"),
        ("x" * 100, "UNISONO_BIND_ADDRESS"),
        ("0.0.0.0", "means all interfaces"),
        ("::", "means all interfaces"),
        ("203.0.113.7", "it must be an address, a host name, an interface or a network of this machine: lo 127.0.0.1"),
    ],
)
def test_init_refuses_a_bind_address_that_is_not_of_this_machine(option: str, why: str) -> None:
    with pytest.raises(UsageError, match="UNISONO_BIND_ADDRESS") as caught:
        un.init(un.Options(bind_address=option))
    assert why in caught.value.message


def test_network_of_all_addresses_excludes_loopback() -> None:
    try:
        address = address_for("0.0.0.0/0")
    except UsageError as error:
        assert "has no address in it" in error.message  # noqa: PT017  (a machine without a network)
    else:
        assert not address.startswith("127.")


def reduce_by_tcp(world: un.Communicator, say: Any) -> None:
    total = world.allreduce(np.arange(100_000) * (world.rank + 1))
    hosts = {member.addresses.tcp_host for member in world._executor._session._members}  # type: ignore[attr-defined]
    say((int(total.sum()), hosts, {traffic.transport for traffic in world.stats().values()}))


@pytest.mark.parametrize(("option", "address"), WAYS[1:4])
def test_ranks_reach_each_other_at_their_bind_address(option: str, address: str, tmp_path: Path) -> None:
    with Job(reduce_by_tcp, 3, tmp_path, transports="tcp", bind_address=option) as job:
        assert job.hear_all() == [(6 * 4_999_950_000, {address}, {"tcp"})] * 3


def meet_over_ipv6(world: un.Communicator, say: Any, port: int) -> None:
    options = un.Options(transports="tcp", bind_address="::1")
    with un.init(options, store=f"tcp://[::1]:{port}", rank=world.rank, size=world.size) as other:
        say(int(other.allreduce(np.array(other.rank + 1))))


@needs_ipv6
def test_store_works_over_ipv6(tmp_path: Path) -> None:
    with Job(meet_over_ipv6, 3, tmp_path, free_port("::1")) as job:
        assert job.hear_all() == [6, 6, 6]


# --- the roster ----------------------------------------------------------------------------------------------------


def member(rank: int, host: str, address: str) -> RosterMember:
    return RosterMember(
        rank,
        Addresses(host, f"name-{rank}", address, 4000 + rank, 100 + rank),
        "3",
        Surroundings(host, "node", 1, 2, 3),
        rank,
    )


def test_roster_refuses_loopback_addresses_across_hosts() -> None:
    members = [member(0, "a", "10.0.0.1"), member(1, "b", "127.0.0.1"), member(2, "b", "::1")]
    record = roster_record([entry_of(entry, 3) for entry in members], {})
    with pytest.raises(RendezvousError, match=r"rank 1 and 1 more can be reached .* set UNISONO_BIND_ADDRESS"):
        roster_of(record, 3)
    same_host = [member(rank, "a", "127.0.0.1") for rank in range(3)]
    assert roster_of(roster_record([entry_of(entry, 3) for entry in same_host], {}), 3).members == tuple(same_host)


def test_roster_names_a_rank_with_another_number_of_ranks() -> None:
    entries = [entry_of(member(rank, "a", "127.0.0.1"), 4 if rank == 2 else 3) for rank in range(3)]
    with pytest.raises(RendezvousError, match=r"rank 2 runs .* as one of 4 ranks, and rank 0 .* as one of 3 ranks"):
        roster_of(roster_record(entries, {}), 3)
