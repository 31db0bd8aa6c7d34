"""Measures the delay and the rate between hosts that are far apart, while their ranks meet.

Theory of operation. Rank 0 decides whether the hosts measure, once all control links have arrived and before any rank
begins. The kernel has measured their round trips. If the longest takes 5 ms or more, rank 0 sends an appointment over
the links, and the first rank of each host takes part. Such a rank dials the hosts before it, all at the same time. Each
pair of hosts then has a turn each way. The sender sends zeros, and the receiver measures their rate. At the same time,
the acknowledgements of a fast way would wait behind the data of a slow way back. Pairs without a common host have the
same turns, so 4 hosts need 3 for each direction. At last each host sends its measurements to rank 0, which passes the
network to all ranks.

No call is involved, so no rank counts or records anything. A turn takes 12 round trips, because a connection begins
slowly, and 2 s at most. If a host fails or is late, it closes its connections, and rank 0 gets no network from it. The
ranks then begin without a network, after the time limit of the appointment at the latest. So they do if the hosts are
near by the many packets of the turns: on a busy machine, the few packets of the links may have taken long.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from unisono.errors import UnisonoError
from unisono.foundation import log
from unisono.foundation.deadlines import LONGEST_WAIT_S, Deadline
from unisono.foundation.json_checks import checked
from unisono.transports.links.handshake import Hello
from unisono.transports.links.link_messages import receive, send
from unisono.transports.tcp.round_trips import least_round_trip_s

_log = log.get("links")

# Hosts are far apart if a round trip takes this long. More hosts than `_MOST_HOSTS` are not measured.
_FAR_S = 0.005
_MOST_HOSTS = 16
# The round trips and seconds of a turn, and the seconds that all turns share unless they are few round trips each.
_ROUND_TRIPS, _FEW_ROUND_TRIPS = 12, 6
_LEAST_TURN_S, _MOST_TURN_S, _SHARED_S = 0.1, 2.0, 4.0
# The time for dialling and for hosts that have to wait for a core.
_GRACE_S = 3.0
_MOST_NBYTES = 64 << 20  # in a turn, each way
_CHUNK_NBYTES = 128 << 10
_ZEROS = bytes(_CHUNK_NBYTES)
_LOOK_MS = 10.0
_READY = b"!"
# How long a host waits for the rest of the data before it sends, as a part of a turn, and when it has come.
_DRAIN, _QUIET_S = 0.5, 0.05
_TCP_NOTSENT_LOWAT = 25  # of <linux/tcp.h>

# The purpose of a connection between measuring hosts; the HELLO carries it in its field `lane`.
_TO_MEASURE, _TO_REPORT = 0, 1

Matrix = tuple[tuple[float, ...], ...]
OnConnected = Callable[[socket.socket], None]
OnError = Callable[[UnisonoError], None]
# Dials a rank in the background: (rank, lane, on_connected, on_error).
Dial = Callable[[int, int, OnConnected, OnError], None]


class Network(NamedTuple):
    """The measurements of the hosts, in the order of the hosts.

    Attributes:
        round_trip_s: the least round trip between two hosts; 0 from a host to itself.
        per_byte_s: the seconds of a byte from a host (row) to another (column); 0 from a host to itself.
    """

    round_trip_s: Matrix
    per_byte_s: Matrix

    @property
    def is_far(self) -> bool:
        """Whether hosts are far apart."""
        return max(map(max, self.round_trip_s)) >= _FAR_S

    @classmethod
    def of(cls, message: Any) -> Network:
        """Return the network in a message of rank 0; raises ValueError if the message has no valid one."""
        checked(message, {"round_trip_s": [[float]], "per_byte_s": [[float]]})
        network = cls(*(tuple(map(tuple, message[name])) for name in cls._fields))
        hosts = len(network.round_trip_s)
        if hosts > _MOST_HOSTS:
            raise ValueError("the network has too many hosts")
        for matrix in network:
            if len(matrix) != hosts or any(len(row) != hosts for row in matrix):
                raise ValueError("a matrix of the network is not square")
            if not all((value > 0) != (i == j) for i, row in enumerate(matrix) for j, value in enumerate(row)):
                raise ValueError("a value of the network is not positive")
        return network


class Appointment(NamedTuple):
    """The decision of rank 0 that the hosts measure their network, with the times.

    Attributes:
        turn_s: the seconds of each turn, for one direction.
        limit_s: the seconds after which every host gives up.
    """

    turn_s: float
    limit_s: float

    @classmethod
    def of(cls, message: Any) -> Appointment:
        """Return the appointment in a message of rank 0; raises ValueError if the message has no valid one."""
        checked(message, dict.fromkeys(cls._fields, float))
        terms = cls(*(message[name] for name in cls._fields))
        if not 0 < terms.turn_s <= _MOST_TURN_S or not 0 < terms.limit_s < LONGEST_WAIT_S:
            raise ValueError(f"the times of a network measurement cannot be {terms.turn_s} s and {terms.limit_s} s")
        return terms


def appointment(round_trips_s: Sequence[float], hosts: int, remaining_s: float) -> Appointment | None:
    """Return the appointment for hosts, or None if they are near, too many, or would need too much of the time."""
    longest_s = max(round_trips_s, default=0.0)
    if longest_s < _FAR_S or not 2 <= hosts <= _MOST_HOSTS:
        return None
    count = len(turns(hosts))
    turn_s = min(
        _ROUND_TRIPS * longest_s + _LEAST_TURN_S, max(_SHARED_S / count, _FEW_ROUND_TRIPS * longest_s), _MOST_TURN_S
    )
    limit_s = count * ((2 + _DRAIN) * turn_s + longest_s) + _ROUND_TRIPS * longest_s + _GRACE_S
    return Appointment(turn_s, limit_s) if 2 * limit_s < remaining_s else None


def turns(hosts: int) -> list[list[tuple[int, int]]]:
    """Return, for each turn, the pairs of hosts that measure; each pair has one turn (the circle method).

    >>> turns(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    seats = hosts + hosts % 2
    circle = list(range(1, seats))
    schedule = []
    for turn in range(seats - 1):
        seated = [0, *circle[len(circle) - turn :], *circle[: len(circle) - turn]]
        pairs = [(seated[k], seated[-1 - k]) for k in range(seats // 2)]
        schedule.append(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < hosts))
    return schedule


class ProbeConnections:
    """The connections for measuring, by lane and peer, until `take` returns them. Closed, it keeps none."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived: dict[tuple[int, int], socket.socket] = {}
        self._failure: UnisonoError | None = None
        self._is_closed = False

    def admit(self, hello: Hello, sock: socket.socket) -> None:
        """Take over a connection that another host has dialled, without blocking."""
        self.add(hello.lane, hello.sender, sock)

    def add(self, lane: int, peer: int, sock: socket.socket) -> None:
        """Take over a connection, without blocking."""
        with self._changed:
            if self._is_closed or (lane, peer) in self._arrived:
                sock.close()
                return
            self._arrived[lane, peer] = sock
            self._changed.notify_all()

    def fail(self, error: UnisonoError) -> None:
        """Make `take` raise an error, because a host cannot be dialled."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def take(self, lane: int, peer: int, deadline: Deadline) -> socket.socket:
        """Wait for the connection of this lane and peer, and return it.

        Raises:
            TimeoutError: it is not there before the deadline.
            UnisonoError: a host cannot be dialled.
        """

        def has_ended() -> bool:
            return self._failure is not None or self._is_closed or (lane, peer) in self._arrived

        with self._changed:
            self._changed.wait_for(has_ended, deadline.remaining_s())
            if self._failure is not None:
                raise self._failure
            if (lane, peer) not in self._arrived:
                raise TimeoutError(f"rank {peer} did not connect in time for the network measurement")
            return self._arrived.pop((lane, peer))

    def close(self) -> None:
        """Close all connections that nobody has taken, and those that come later."""
        with self._changed:
            self._is_closed = True
            arrived, self._arrived = self._arrived, {}
            self._changed.notify_all()
        for sock in arrived.values():
            sock.close()


def measure(
    rank: int, leaders: Sequence[int], probes: ProbeConnections, dial: Dial, terms: Appointment
) -> Network | None:
    """Take part in the measuring as the first rank of a host; return the network on rank 0, and None elsewhere.

    It returns None if a host fails or is late. It takes at most `terms.limit_s`, and no connection outlives it.

    Args:
        rank: this rank.
        leaders: the first rank of each host, of which rank 0 is the first.
        probes: the connections.
        dial: connects to a rank in the background.
        terms: the decision of rank 0.
    """
    try:
        return _measured(rank, leaders, probes, dial, terms)
    except (OSError, ValueError, UnisonoError) as error:  # TimeoutError is an OSError
        _log.info("the network between the hosts is not known: %s", error)
        return None
    finally:
        probes.close()


def _measured(
    rank: int, leaders: Sequence[int], probes: ProbeConnections, dial: Dial, terms: Appointment
) -> Network | None:
    deadline, me = Deadline(terms.limit_s), leaders.index(rank)
    for peer in leaders[:me]:
        dial(peer, _TO_MEASURE, partial(probes.add, _TO_MEASURE, peer), probes.fail)
    if me:
        dial(0, _TO_REPORT, partial(probes.add, _TO_REPORT, 0), probes.fail)
    row = [[0.0, 0.0] for _ in leaders]
    for pairs in turns(len(leaders)):
        for pair in pairs:
            if me in pair:
                peer = sum(pair) - me
                sock = probes.take(_TO_MEASURE, leaders[peer], deadline)
                row[peer] = list(_pair(sock, terms.turn_s, deadline, sends_first=me < peer))
    if me:
        with probes.take(_TO_REPORT, 0, deadline) as link:
            send(link, {"row": row})
        return None
    rows = [row]
    for leader in leaders[1:]:
        with probes.take(_TO_REPORT, leader, deadline) as link:
            rows.append(receive(link, deadline, {"row": [[float]]})["row"])
    return _network(rows)


def _network(rows: Sequence[Sequence[Sequence[float]]]) -> Network:
    """Return the network of which each host has measured a row: round trips, and seconds of a byte to that host."""
    hosts = range(len(rows))
    if any(len(row) != len(rows) or any(len(values) != 2 for values in row) for row in rows):
        raise ValueError(f"a host sent other measurements than one pair for each of the {len(rows)} hosts")
    return Network.of(
        {
            "round_trip_s": [[min(rows[i][j][0], rows[j][i][0]) for j in hosts] for i in hosts],
            "per_byte_s": [[rows[j][i][1] for j in hosts] for i in hosts],
        }
    )


def _pair(sock: socket.socket, turn_s: float, deadline: Deadline, *, sends_first: bool) -> tuple[float, float]:
    """Send zeros to a host for a turn, and receive for one; return the least round trip, and the seconds of a byte.

    The connection is reset at the end, so that nothing of it delays the next turn.
    """
    with sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(OSError):  # the kernel's default stays
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        sock.settimeout(deadline.checked_remaining_s())
        sock.sendall(_READY)
        if sock.recv(1) != _READY:
            raise ConnectionAbortedError("another host has stopped measuring")
        sock.setblocking(False)  # with a time limit, `recv` would wait for data, and `send` for room
        round_trip_s = least_round_trip_s(sock)
        # Data that the kernel has not sent yet at the end of a turn would hold up the way back.
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _CHUNK_NBYTES)
        if sends_first:
            _send(sock, min(turn_s, deadline.checked_remaining_s()))
        longest_s = turn_s * (1 + _DRAIN * sends_first)  # the other host has to wait for the data of this one
        arrivals = _arrivals(sock, min(longest_s, deadline.checked_remaining_s()))
        if not sends_first:
            _drain(sock, _DRAIN * turn_s)
            _send(sock, min(turn_s, deadline.checked_remaining_s()))
        per_byte_s = _per_byte_s(arrivals)
        return min(round_trip_s, least_round_trip_s(sock) or round_trip_s), per_byte_s


def _send(sock: socket.socket, turn_s: float) -> None:
    """Send zero bytes for the time of a turn."""
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    end_s, sent = time.monotonic() + turn_s, 0
    with contextlib.suppress(ConnectionError):  # the other host ended its turn a moment before
        while (now_s := time.monotonic()) < end_s and sent < _MOST_NBYTES:
            if poll.poll(min(_LOOK_MS, 1e3 * (end_s - now_s))):
                with contextlib.suppress(BlockingIOError):
                    sent += sock.send(_ZEROS)


def _drain(sock: socket.socket, most_s: float) -> None:
    """Receive the bytes that are still under way, until none arrives for a moment."""
    end_s = time.monotonic() + most_s
    while time.monotonic() < end_s and select.select([sock], [], [], _QUIET_S)[0]:
        if not sock.recv(_CHUNK_NBYTES):
            break


def _arrivals(sock: socket.socket, turn_s: float) -> list[tuple[float, int]]:
    """Receive for the time of a turn. Return (time, number of bytes up to then) for each receive."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    end_s, arrivals = time.monotonic() + turn_s, [(time.monotonic(), 0)]
    with contextlib.suppress(ConnectionError):  # the other host ended its turn a moment before
        while (now_s := time.monotonic()) < end_s and arrivals[-1][1] < _MOST_NBYTES:
            if not poll.poll(min(_LOOK_MS, 1e3 * (end_s - now_s))):
                continue
            data = sock.recv(_CHUNK_NBYTES)
            if not data:
                break
            arrivals.append((time.monotonic(), arrivals[-1][1] + len(data)))
    return arrivals


def _per_byte_s(arrivals: Sequence[tuple[float, int]]) -> float:
    """Return the seconds of a byte in the last third of the time, because a connection begins slowly.

    >>> _per_byte_s([(0.0, 0), (1.0, 10), (2.0, 60), (3.0, 160)])
    0.01
    """
    (began_s, _), (ended_s, nbytes) = arrivals[0], arrivals[-1]
    from_s = ended_s - (ended_s - began_s) / 3
    before_s, before = max(arrival for arrival in arrivals if arrival[0] <= from_s or arrival is arrivals[0])
    if nbytes == before or math.isclose(ended_s, before_s):
        raise ValueError("another host sent too few bytes to measure the rate of its link")
    return (ended_s - before_s) / (nbytes - before)
