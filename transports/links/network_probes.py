"""Measures the delay and the rate between hosts that are far apart, while their ranks meet.

Theory of operation. Rank 0 decides whether the hosts measure, once all control links have arrived and before any rank
begins. The kernel has measured their round trips. If the longest takes 5 ms or more, rank 0 sends an appointment over
the links, and the first rank of each host takes part. Such a rank dials the hosts before it, all at the same time, with
several connections for each way. Then each way has a turn (probe_turns.py). In a turn, a host sends to one host and
receives from another one: no way is measured together with its way back, because the acknowledgements of a fast way
would wait behind the data of a slow way back. So 4 hosts need 4 turns, and 5 hosts too. At last each host sends its
measurements to rank 0, which passes the network to all ranks.

No call is involved, so no rank counts or records anything. If a host fails or is late, it closes its connections, and
rank 0 gets no network from it. The ranks then begin without a network, after the time limit of the appointment at the
latest. So they do if the hosts are near by the many packets of the turns: on a busy machine, the few packets of the
links may have taken long.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from unisono.errors import UnisonoError
from unisono.foundation import log
from unisono.foundation.deadlines import LONGEST_WAIT_S, Deadline
from unisono.foundation.json_checks import checked
from unisono.transports.links.handshake import Hello
from unisono.transports.links.link_messages import receive, send
from unisono.transports.links.probe_turns import Way, measured_turn

_log = log.get("links")

# Hosts are far apart if a round trip takes this long. More hosts than `_MOST_HOSTS` are not measured.
_FAR_S = 0.005
_MOST_HOSTS = 16
# A turn takes so many round trips and seconds, because a connection begins slowly.
_ROUND_TRIPS, _LEAST_TURN_S, _MOST_TURN_S = 6, 0.6, 2.0
# The time for dialling and for hosts that have to wait for a core, and the round trips between two turns.
_GRACE_S, _BETWEEN = 3.0, 2
# The connections of a way, and about how many a host has in all.
_MOST_STREAMS, _MOST_CONNECTIONS = 16, 128

# The connection for the report of a host; the HELLO carries it in its field `lane`. The lanes behind it are those of
# the connections on which the dialler sends, and then of those on which it receives.
_TO_REPORT, _FIRST_STREAM = 0, 1

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
    turn_s = min(max(_ROUND_TRIPS * longest_s, _LEAST_TURN_S), _MOST_TURN_S)
    limit_s = (len(turns(hosts)) + 1) * (turn_s + _BETWEEN * longest_s) + _GRACE_S
    return Appointment(turn_s, limit_s) if 2 * limit_s < remaining_s else None


def turns(hosts: int) -> list[list[tuple[int, int]]]:
    """Return, for each turn, the ways that are measured, as (from, to); each way has one turn.

    In a turn, each host is the source of at most one way and the target of at most one, and no way is its way back.

    >>> turns(3)
    [[(0, 1), (1, 2), (2, 0)], [(0, 2), (1, 0), (2, 1)]]
    >>> turns(2)
    [[(0, 1)], [(1, 0)]]
    """
    schedule = []
    for distance in range(1, hosts):
        ways = [(host, (host + distance) % hosts) for host in range(hosts)]
        is_half = 2 * distance == hosts  # then half of the ways are the ways back of the others
        schedule += [ways[:distance], ways[distance:]] if is_half else [ways]
    return schedule


def streams(hosts: int) -> int:
    """Return the number of connections of a way."""
    return min(_MOST_STREAMS, _MOST_CONNECTIONS // (2 * (hosts - 1)))


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

    def is_closed(self) -> bool:
        """Return whether nobody needs the connections any more."""
        return self._is_closed

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
    for place, peer in enumerate(leaders[:me]):
        for lane in (*_lanes(len(leaders), me, place), *_lanes(len(leaders), place, me)):
            dial(peer, lane, partial(probes.add, lane, peer), probes.fail)
    if me:
        dial(0, _TO_REPORT, partial(probes.add, _TO_REPORT, 0), probes.fail)
    row = _row(me, leaders, probes, terms.turn_s, deadline)
    if me:
        with probes.take(_TO_REPORT, 0, deadline) as link:
            send(link, {"row": row})
        return None
    rows = [row]
    for leader in leaders[1:]:
        with probes.take(_TO_REPORT, leader, deadline) as link:
            rows.append(receive(link, deadline, {"row": [[float]]})["row"])
    return _network(rows)


def _row(me: int, leaders: Sequence[int], probes: ProbeConnections, turn_s: float, deadline: Deadline) -> list[Way]:
    """Take all turns of a host; return its ways to all hosts."""
    row = [Way(0.0, 0.0) for _ in leaders]
    for ways in turns(len(leaders)):
        with contextlib.ExitStack() as opened:
            socks: dict[int, list[socket.socket]] = {}
            for source, target in ways:
                if me in (source, target):
                    lanes, peer = _lanes(len(leaders), source, target), leaders[source + target - me]
                    socks[source] = [opened.enter_context(probes.take(lane, peer, deadline)) for lane in lanes]
            to_next = socks.pop(me, [])
            from_last = [sock for each in socks.values() for sock in each]
            way = measured_turn(to_next, from_last, turn_s, deadline, probes.is_closed)
            if way is not None:
                row[dict(ways)[me]] = way
    return row


def _lanes(hosts: int, source: int, target: int) -> range:
    """Return the lanes of the connections of a way. The later one of two hosts dials the other one."""
    count = streams(hosts)
    first = _FIRST_STREAM + count * (source < target)
    return range(first, first + count)


def _network(rows: Sequence[Sequence[Sequence[float]]]) -> Network:
    """Return the network of which each host has measured a row: round trips, and seconds of a byte to that host."""
    hosts = range(len(rows))
    for host, row in enumerate(rows):
        if len(row) != len(rows) or any(len(values) != 2 for values in row):
            raise ValueError(
                f"the measurements of host {host} are not a round trip and the seconds of a byte for each of "
                f"{len(rows)} hosts"
            )
    return Network.of(
        {
            "round_trip_s": [[min(rows[i][j][0], rows[j][i][0]) for j in hosts] for i in hosts],
            "per_byte_s": [[per_byte_s for _, per_byte_s in row] for row in rows],
        }
    )
