"""The parts of a machine: network interfaces with speed and NUMA node, and the topology of a communicator."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import NamedTuple

import ifaddr
import pytest

import unisono as un
from unisono.tuning.machine.inventory import Interface, interfaces


class Adapter(NamedTuple):
    name: str
    ips: list[ifaddr.IP]


def test_interfaces_have_speed_and_numa_node_where_the_system_reports_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, slow = tmp_path / "ib0", tmp_path / "eth0"
    (fast / "device").mkdir(parents=True)
    (fast / "speed").write_text("200000\n")
    (fast / "device" / "numa_node").write_text("1\n")
    slow.mkdir()
    (slow / "speed").write_text("-1\n")
    addresses = {
        "lo": ["127.0.0.1"],
        "ib0": [("fd00::7", 0, 0), "10.0.0.7"],
        "eth0": ["192.0.2.7"],
        "down": ["169.254.0.7"],
    }
    adapters = [Adapter(name, [ifaddr.IP(ip, 24, name) for ip in ips]) for name, ips in addresses.items()]
    monkeypatch.setattr("ifaddr.get_adapters", lambda: adapters)
    assert interfaces(tmp_path) == (
        Interface("eth0", ("192.0.2.7",), 0.0, -1),
        Interface("ib0", ("10.0.0.7", "fd00::7"), 200e9, 1),
    )
    assert [str(interface) for interface in interfaces(tmp_path)] == [
        "eth0 192.0.2.7 (speed unknown)",
        "ib0 10.0.0.7 fd00::7 (200 Gbit/s, NUMA node 1)",
    ]


def test_topology_of_a_communicator_has_its_hosts_and_this_machine() -> None:
    with un.init() as world:
        topology = world.topology
    assert (topology.hosts, topology.host) == (((0,),), 0)
    assert {interface.name for interface in topology.machine.interfaces} <= {name for _, name in socket.if_nameindex()}
    assert set(topology.machine.describe()) == {"processors", "gpus", "network"}
