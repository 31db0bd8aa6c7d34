"""The wide-area network of namespaces: its rates, delays, losses, cuts and bounds; and the benchmark across it.

Sockets of this process in the namespaces measure the network, because all of them share a clock.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.deadlines import eventually
from support.hosts import needs_wide_area

from unisono.bench import namespaces, wide_area as wide_area_module
from unisono.bench.namespaces import address
from unisono.bench.programs import wan
from unisono.bench.programs.wan import bound_s
from unisono.bench.wide_area import (
    PRESETS,
    AccessLine,
    Area,
    NetworkWay,
    WideAreaNetwork,
    home_lines,
    in_namespace,
    uniform,
    wide_area,
)
from unisono.errors import UsageError

PORT = 9
WHOLE_PACKET = bytes(1500 - 28)  # without the headers of IP and UDP
SO_RCVBUFFORCE = 33


def udp(network: WideAreaNetwork, host: int) -> socket.socket:
    def opened() -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
        sock.bind((address(host), PORT))
        sock.setblocking(False)
        return sock

    return in_namespace(network.namespaces[host], opened)


@pytest.fixture
def sockets(wide_area_of: Callable[[Area], WideAreaNetwork]) -> Iterator[Callable[[Area], list[socket.socket]]]:
    """A function that creates an area and returns a UDP socket on each of its hosts."""
    opened: list[socket.socket] = []

    def of(area: Area) -> list[socket.socket]:
        network = wide_area_of(area)
        opened.extend(udp(network, host) for host in range(len(area.lines)))
        return opened

    yield of
    for sock in opened:
        sock.close()


def arrivals(sock: socket.socket, quiet_s: float = 0.5) -> list[float]:
    """Return when each packet arrived, until none has for `quiet_s`."""
    times = []
    while select.select([sock], [], [], quiet_s)[0]:
        sock.recv(2048)
        times.append(time.monotonic())
    return times


def least_delay_s(source: socket.socket, sink: socket.socket, enough_s: float) -> float:
    """Return the least delay of packets that are sent one by one, until one takes at most `enough_s`.

    The machine delays some packets, so the function sends more of them.
    """
    least = float("inf")

    def measured() -> bool:
        nonlocal least
        began = time.monotonic()
        source.sendto(b"?", sink.getsockname())
        for arrived in arrivals(sink, 0.3)[:1]:
            least = min(least, arrived - began)
        return least <= enough_s

    eventually(measured)
    return least


def received_mbit_s(source: socket.socket, sink: socket.socket, packets: int) -> float:
    """Return the rate of packets that are sent at once, counting each with its headers."""
    for _ in range(packets):
        source.sendto(WHOLE_PACKET, sink.getsockname())
    times = arrivals(sink)
    return (len(times) - 1) * 8 * 1500 / (times[-1] - times[0]) / 1e6


def reaches_rate(source: socket.socket, sink: socket.socket, mbit_s: float) -> bool:
    """Return whether packets that the queue can hold arrive at this rate within 5 %, in one of several attempts."""
    packets = int(mbit_s * 0.08e6 / 8 / 1500)
    return eventually(lambda: abs(received_mbit_s(source, sink, packets) / mbit_s - 1) <= 0.05)


ASYMMETRIC = Area(
    (AccessLine(), AccessLine(), AccessLine()),
    {(0, 1): NetworkWay(50, 40), (1, 0): NetworkWay(10, 90), (0, 2): NetworkWay(0, 100)},
)


@needs_wide_area
def test_each_way_has_its_own_delay_and_rate(sockets: Callable[[Area], list[socket.socket]]) -> None:
    hosts = sockets(ASYMMETRIC)
    for (source, target), delay_ms in {(0, 1): 40, (1, 0): 90, (0, 2): 100, (2, 0): 0}.items():
        least = least_delay_s(hosts[source], hosts[target], (delay_ms + 2) / 1e3)
        assert delay_ms / 1e3 <= least <= (delay_ms + 2) / 1e3
    for (source, target), mbit_s in {(0, 1): 50, (1, 0): 10}.items():
        assert reaches_rate(hosts[source], hosts[target], mbit_s)


@needs_wide_area
def test_ways_share_the_line_of_their_host(sockets: Callable[[Area], list[socket.socket]]) -> None:
    one, two, three = sockets(Area((AccessLine(up_mbit_s=20), AccessLine(), AccessLine()), {}))
    began = time.monotonic()
    for _ in range(60):
        for sink in (two, three):
            one.sendto(WHOLE_PACKET, sink.getsockname())
    times = [*arrivals(two)]
    assert (len(times), len(arrivals(three))) == (60, 60)
    assert times[-1] - began >= 119 * 8 * 1500 / 20e6


@needs_wide_area
def test_link_drops_packets_that_its_queue_cannot_hold(sockets: Callable[[Area], list[socket.socket]]) -> None:
    one, two = sockets(uniform(2, AccessLine(), NetworkWay(mbit_s=12)))  # a packet takes 1 ms, so the queue holds 100
    for _ in range(1000):
        one.sendto(WHOLE_PACKET, two.getsockname())
    assert 100 <= len(arrivals(two)) < 1000


@needs_wide_area
def test_share_of_packets_is_lost_and_jitter_keeps_their_order(
    sockets: Callable[[Area], list[socket.socket]],
) -> None:
    one, two = sockets(uniform(2, AccessLine(), NetworkWay(delay_ms=5, jitter_ms=20, loss=0.1)))
    for number in range(5000):
        one.sendto(number.to_bytes(2, "big"), two.getsockname())
    numbers = []
    while select.select([two], [], [], 1.0)[0]:
        numbers.append(int.from_bytes(two.recv(16), "big"))
    assert numbers == sorted(numbers)
    assert 0.08 < 1 - len(numbers) / 5000 < 0.12


@needs_wide_area
def test_cut_ways_carry_nothing_until_they_are_mended(wide_area_of: Callable[[Area], WideAreaNetwork]) -> None:
    network = wide_area_of(uniform(3))
    with closing(udp(network, 0)) as one, closing(udp(network, 1)) as two, closing(udp(network, 2)) as three:
        network.cut(0, 1)
        for sink in (two, three):
            one.sendto(b"?", sink.getsockname())
        two.sendto(b"?", one.getsockname())
        assert [len(arrivals(sock, 0.5)) for sock in (one, two, three)] == [0, 0, 1]
        network.cut(0, 1, is_cut=False)
        one.sendto(b"?", two.getsockname())
        assert len(arrivals(two, 0.5)) == 1


WRONG: dict[str, tuple[Area, str]] = {
    "one host": (uniform(1), "has 2 to 8 hosts, not 1"),
    "nine hosts": (uniform(9), "has 2 to 8 hosts, not 9"),
    "way to itself": (Area((AccessLine(), AccessLine()), {(1, 1): NetworkWay()}), "and not from 1 to 1"),
    "way to nobody": (Area((AccessLine(), AccessLine()), {(0, 2): NetworkWay()}), "and not from 0 to 2"),
    "negative delay": (uniform(2, way=NetworkWay(delay_ms=-1)), "finite and not negative"),
    "loss above 1": (uniform(2, way=NetworkWay(loss=1.5)), "the loss at most 1"),
    "delay that is no number": (uniform(2, way=NetworkWay(delay_ms=float("nan"))), "finite and not negative"),
    "negative rate": (uniform(2, AccessLine(-1)), "a rate of -1.* Mbit/s is impossible"),
    "infinite rate": (uniform(2, AccessLine(float("inf"))), "a rate of inf Mbit/s is impossible"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_area_is_refused(name: str) -> None:
    area, reason = WRONG[name]
    with pytest.raises(UsageError, match=reason), wide_area(area):
        pass


def test_command_without_root_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    namespaces.missing.cache_clear()
    wide_area_module.missing.cache_clear()
    result = CliRunner().invoke(wan.main, ["--hosts", "2"])
    monkeypatch.undo()
    namespaces.missing.cache_clear()
    wide_area_module.missing.cache_clear()
    assert result.exit_code == 1
    assert "network namespaces need root, ip and tc; missing: root" in result.output


@pytest.mark.parametrize("name", PRESETS)
def test_preset_gives_every_pair_a_way(name: str) -> None:
    for hosts in range(2, 9):
        area = PRESETS[name](hosts)
        assert len(area.lines) == hosts
        assert len(area.ways) == hosts * (hosts - 1)
        assert all(0 < 2 * way.delay_ms <= 200 for way in area.ways.values())


def test_bound_counts_the_bytes_of_all_hosts_and_one_delay() -> None:
    payload = 1448 / 1500
    assert bound_s(
        uniform(4, AccessLine(8 / payload, 8 / payload), NetworkWay(delay_ms=50)), 1_000_000
    ) == pytest.approx(1.55)
    assert bound_s(home_lines(2), 1_000_000) == pytest.approx(1e6 * 8 / 20e6 / payload + 0.02)
    one_way = Area((AccessLine(), AccessLine()), {(0, 1): NetworkWay(8 / payload), (1, 0): NetworkWay()})
    assert bound_s(one_way, 1_000_000) == 0.0  # host 1 may do all the sending


@needs_wide_area
def test_benchmark_measures_calls_or_runs_a_command(tmp_path: Path) -> None:
    output = tmp_path / "wan.jsonl"
    base = [sys.executable, "-m", "unisono.bench.programs.wan", "--hosts", "3", "--rtt", "20"]
    measured = [*base, "--sizes", "8,256K", "--at-once", "2", "--rounds", "1", "--json", str(output)]
    measured += ["--map", str(tmp_path / "map.json"), "--algorithms", "auto,ring(order=(0, 2, 1))"]
    assert subprocess.run(measured, capture_output=True, check=False).returncode == 0
    assert '"nbytes": 262144' in output.read_text()
    assert '"chosen": "ring(order=(0, 2, 1))"' in output.read_text()
    assert json.loads((tmp_path / "map.json").read_text())["delay_s"][0][2] >= 0.01
    program = "import unisono as un; print(un.init().size)"
    ran = subprocess.run([*base, "--", sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "3\n"), ran.stderr
    assert not [name for name in os.listdir("/run/netns") if f"-{os.getpid()}-wan" in name]
