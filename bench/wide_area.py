"""A wide-area network on this machine: network namespaces that the native program `wan_relay` connects.

Each ordered pair of hosts has a `NetworkWay` with a rate, a delay, a jitter and a loss of its own, and each host has an
`AccessLine` that all its ways share. Ways can be cut and changed while programs run. Hosts have the addresses of
`bench.namespaces`, and packets of 1,500 bytes. Needs root, `ip`, `tc` and ``/dev/net/tun``.

A link with a rate drops packets that would wait for longer than 100 ms, or than 32 packets take.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import itertools
import math
import os
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from unisono.bench import namespaces
from unisono.bench.namespaces import PREFIX, address, ip, left_behind, remove
from unisono.errors import UsageError
from unisono.transports import core_path

MOST_HOSTS = 8
MTU = 1500
_QUEUE_S, _QUEUE_PACKETS = 0.1, 32
_TUN = "/dev/net/tun"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()

Result = TypeVar("Result")


class AccessLine(NamedTuple):
    """The access of one host to the network: the rates of all that it sends and receives; 0 is unlimited."""

    up_mbit_s: float = 0.0
    down_mbit_s: float = 0.0


class NetworkWay(NamedTuple):
    """The network from one host to another.

    Attributes:
        mbit_s: the rate; 0 is unlimited.
        delay_ms: the time for which a packet is under way.
        jitter_ms: the most by which this time is longer; uniformly random, and packets never overtake each other.
        loss: the share of packets that are lost.
        is_cut: whether all packets are lost.
    """

    mbit_s: float = 0.0
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    is_cut: bool = False


UNLIMITED, AT_ONCE = AccessLine(), NetworkWay()


class Area(NamedTuple):
    """The lines of all hosts, and the ways by (from, to). A way that is not in the table has no limit and no delay."""

    lines: tuple[AccessLine, ...]
    ways: Mapping[tuple[int, int], NetworkWay]

    def way(self, source: int, target: int) -> NetworkWay:
        """Return the way from a host to another."""
        return self.ways.get((source, target), AT_ONCE)

    def mbit_s(self, source: int, target: int) -> float:
        """Return the rate from a host to another, if nothing else uses their lines; infinite without a limit."""
        rates = (self.lines[source].up_mbit_s, self.way(source, target).mbit_s, self.lines[target].down_mbit_s)
        return min((rate for rate in rates if rate), default=math.inf)


def uniform(hosts: int, line: AccessLine = UNLIMITED, way: NetworkWay = AT_ONCE) -> Area:
    """Return an area whose lines and ways are all equal."""
    return Area((line,) * hosts, dict.fromkeys(_pairs(hosts), way))


def one_city(hosts: int) -> Area:
    """Return hosts with 200 Mbit/s and round trips of 4 ms."""
    return uniform(hosts, AccessLine(200, 200), NetworkWay(delay_ms=2, jitter_ms=0.2))


def one_continent(hosts: int) -> Area:
    """Return hosts along a road with 200 Mbit/s: round trips of 18 ms between neighbours, and 8 ms for each more."""
    ways = {(i, j): NetworkWay(0, 5 + 4 * abs(i - j), 0.5, 0.0001) for i, j in _pairs(hosts)}
    return Area((AccessLine(200, 200),) * hosts, ways)


def two_continents(hosts: int) -> Area:
    """Return hosts with 200 Mbit/s, the even ones on one continent and the odd ones on another.

    Round trips are 20 ms on a continent and 100 ms between them, where a way carries 100 Mbit/s and loses 0.1 %.
    """
    near, far = NetworkWay(0, 10, 0.5, 0.0001), NetworkWay(100, 50, 1, 0.001)
    return Area((AccessLine(200, 200),) * hosts, {(i, j): far if (i + j) % 2 else near for i, j in _pairs(hosts)})


def home_lines(hosts: int) -> Area:
    """Return hosts with 20 Mbit/s up, 100 Mbit/s down, round trips of 40 ms, much jitter, and 0.1 % loss."""
    return uniform(hosts, AccessLine(20, 100), NetworkWay(delay_ms=20, jitter_ms=4, loss=0.001))


PRESETS: Mapping[str, Callable[[int], Area]] = {
    "city": one_city,
    "continent": one_continent,
    "two-continents": two_continents,
    "home": home_lines,
}
"""Areas by name, for a number of hosts."""


@functools.cache
def missing() -> str:
    """Return the text of what this machine lacks for a wide-area network; an empty text if it has everything."""
    if reason := namespaces.missing():
        return reason
    if not os.access(_TUN, os.R_OK | os.W_OK):
        return f"a wide-area network needs {_TUN}, which this process cannot open"
    return "" if _relay_path().exists() else f"a wide-area network needs the native program {_relay_path()}"


class WideAreaNetwork:
    """The running network: its hosts, and functions that change its links at once.

    Attributes:
        namespaces: the names of the hosts' network namespaces.
        area: the present bandwidths of the hosts' lines, and the present ways between hosts.
    """

    def __init__(self, names: list[str], area: Area, relay: subprocess.Popen[str]) -> None:
        self.namespaces = names
        self._relay = relay
        self.area = Area(area.lines, dict(area.ways))
        for host, line in enumerate(area.lines):
            self.set_line(host, line)
        for (source, target), way in area.ways.items():
            self.set_way(source, target, way)

    def set_line(self, host: int, line: AccessLine) -> None:
        """Give a host another line. Packets that have been sent are not affected.

        Raises:
            UsageError: a rate is negative.
        """
        self._command("host", host, _bit_s(line.up_mbit_s), _bit_s(line.down_mbit_s), _queue_us(*line))
        lines = [*self.area.lines]
        lines[host] = line
        self.area = Area(tuple(lines), self.area.ways)

    def set_way(self, source: int, target: int, way: NetworkWay) -> None:
        """Change the way from a host to another. Packets that have been sent are not affected.

        Raises:
            UsageError: a value is negative, or the loss is more than 1.
        """
        _check(way)
        in_us = (round(1e3 * way.delay_ms), round(1e3 * way.jitter_ms))
        self._command(
            "way", source, target, _bit_s(way.mbit_s), _queue_us(way.mbit_s), *in_us, way.loss, int(way.is_cut)
        )
        self.area = Area(self.area.lines, {**self.area.ways, (source, target): way})

    def cut(self, source: int, target: int, *, is_cut: bool = True) -> None:
        """Make both directions between two hosts lose all packets, or none because of this any more."""
        for pair in ((source, target), (target, source)):
            self.set_way(*pair, self.area.way(*pair)._replace(is_cut=is_cut))

    def _command(self, *words: object) -> None:
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        try:
            self._relay.stdin.write(" ".join(map(str, words)) + "\n")
            self._relay.stdin.flush()
            answer = self._relay.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer != "ok\n":
            raise UsageError(f"the relay of the network refuses {' '.join(map(str, words))!r}, or has ended")


@contextlib.contextmanager
def wide_area(
    area: Area, seed: int = 0, before_removal: Callable[[], object] = lambda: None
) -> Iterator[WideAreaNetwork]:
    """Create the hosts of an area and connect them; at the end, remove them.

    Args:
        area: the hosts with their lines and ways.
        seed: decides which packets are lost, and about jitter.
        before_removal: called at the end in any case.

    Raises:
        UsageError: there are too many hosts, a value is wrong, or this machine cannot create hosts; says why.
    """
    hosts = len(area.lines)
    if not 2 <= hosts <= MOST_HOSTS:
        raise UsageError(f"a wide-area network has 2 to {MOST_HOSTS} hosts, not {hosts}")
    for source, target in area.ways:
        if source == target or not {source, target} <= set(range(hosts)):
            raise UsageError(
                f"ways lead from one host to another, from 0 to {hosts - 1}, and not from {source} to {target}"
            )
        _check(area.ways[source, target])
    if reason := missing():
        raise UsageError(reason)
    remove(left_behind())
    names = [f"{PREFIX}{os.getpid()}-wan{next(_numbers)}-{host}" for host in range(hosts)]
    try:
        with _connected(names, seed) as relay:
            try:
                yield WideAreaNetwork(names, area, relay)
            finally:
                relay.kill()
    finally:
        before_removal()
        remove(names)


def in_namespace(namespace: str, function: Callable[[], Result]) -> Result:
    """Return the result of a function that a thread of its own runs in a network namespace.

    A socket that the function opens stays in the namespace. The function raises nothing but OSError.
    """
    results: list[Result] = []
    errors: list[OSError] = []

    def run() -> None:
        try:
            with Path("/run/netns", namespace).open() as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
            results.append(function())
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _pairs(hosts: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(hosts) for j in range(hosts) if i != j]


def _check(way: NetworkWay) -> None:
    if not (all(0 <= number < math.inf for number in way[:4]) and way.loss <= 1):
        raise UsageError(f"{way} cannot be simulated: numbers must be finite and not negative, and the loss at most 1")


def _bit_s(mbit_s: float) -> int:
    if not 0 <= mbit_s < math.inf:
        raise UsageError(f"a rate of {mbit_s} Mbit/s is impossible: use a positive number, or 0 for no limit")
    return round(1e6 * mbit_s)


def _queue_us(*rates_mbit_s: float) -> int:
    """Return for how long a packet may wait before a link drops it."""
    slowest = min((rate for rate in rates_mbit_s if rate), default=math.inf)
    return round(1e6 * max(_QUEUE_S, _QUEUE_PACKETS * 8 * MTU / (1e6 * slowest)))


def _relay_path() -> Path:
    return Path(core_path()).with_name("wan_relay")


def _open_device() -> int:
    descriptor = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TUN | _IFF_NO_PI))
    return descriptor


def _set_up(host: int, namespace: str) -> None:
    ip("link", "set", "lo", "up", namespace=namespace)
    ip("addr", "add", f"{address(host)}/24", "dev", "eth0", namespace=namespace)
    ip("link", "set", "eth0", "mtu", str(MTU), "txqueuelen", "10000", "up", namespace=namespace)


def _connected(names: list[str], seed: int) -> subprocess.Popen[str]:
    """Create the namespaces with their interfaces, and start the relay between these."""
    devices = list[int]()
    try:
        for host, name in enumerate(names):
            ip("netns", "add", name)
            devices.append(in_namespace(name, _open_device))
            _set_up(host, name)
        command = [str(_relay_path()), str(seed), *map(str, devices)]
        return subprocess.Popen(command, text=True, pass_fds=devices, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    finally:
        for device in devices:
            os.close(device)
