"""One turn of a host that measures its network: it sends zeros to one host, and receives zeros from another one.

Theory of operation. A way has several connections, because each begins with ten packets and doubles them once in a
round trip. The receiver says when it is ready. The sender then sends for the time of a turn and resets the connections,
which ends the turn of the receiver. Meanwhile it samples how many packets the receiver has acknowledged on all of them,
those after a lost packet included. So no loss delays a sample.

The rate is the highest one over 3/8 of the turn, after its first 3/10. A connection begins slowly, then too fast, and
may pause after losses. Acknowledgements that wait behind data of another direction arrive in bursts, so the rate over a
shorter window may be half too high. Other traffic on the line makes the rate of a window too low. A short burst of it
leaves other windows as they are, so the highest rate counts, and neither the mean nor the median.
"""

from __future__ import annotations

import bisect
import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from unisono.foundation.deadlines import Deadline
from unisono.transports.tcp.tcp_info import delivered_nbytes, least_round_trip_s

_CHUNK_NBYTES = 64 << 10
_ZEROS = bytes(_CHUNK_NBYTES)
_MOST_NBYTES = 64 << 20  # of all connections in a turn
_READY = b"!"
_LOOK_S = 0.01
# The parts of a turn in which the rate is measured, and over which.
_SETTLED, _WINDOW = 0.3, 0.375
# The parts of a turn after which a receiver does not wait for the reset of connections, because it may be lost.
_LONGEST = 1.5
_TCP_NOTSENT_LOWAT = 25  # of <linux/tcp.h>

Sample = tuple[float, int]
"""A time, and the number of bytes that have been delivered by then."""


class Way(NamedTuple):
    """The least round trip of a way, and the seconds of a byte on it."""

    round_trip_s: float
    per_byte_s: float


def measured_turn(
    to_next: Sequence[socket.socket],
    from_last: Sequence[socket.socket],
    turn_s: float,
    deadline: Deadline,
    is_over: Callable[[], bool] = lambda: False,
) -> Way | None:
    """Send to a host and receive from another one; return the way to the first, or None if there is none.

    The caller closes the connections afterwards.

    Args:
        to_next: the connections to the host that receives; may be empty.
        from_last: the connections from the host that sends; may be empty.
        turn_s: the seconds for which a sender sends.
        deadline: the end of waiting for the other hosts.
        is_over: returns whether this host does not need the result any more.

    Raises:
        TimeoutError: another host is not ready before `deadline`.
        OSError: another host has stopped measuring, or this one has.
        ValueError: too few bytes arrived.
    """
    for sock in (*to_next, *from_last):
        _prepare(sock)
    turn = _Turn(to_next, from_last, turn_s)
    turn.run(deadline, is_over)
    return Way(turn.round_trip_s, per_byte_s(turn.samples)) if to_next else None


def per_byte_s(samples: Sequence[Sample]) -> float:
    """Return the least seconds of a byte over 3/8 of the time, after its first 3/10; or those over all of the time.

    It takes all of the time if nothing was delivered in the later part, or if samples are too few.

    Raises:
        ValueError: nothing was delivered.

    >>> per_byte_s([(0.0, 0), (1.0, 10), (2.0, 60), (3.0, 160), (4.0, 260)])
    0.01
    >>> per_byte_s([(0.0, 0), (1.0, 10)])
    0.1
    """
    began_s, length_s = samples[0][0], samples[-1][0] - samples[0][0]
    settled = [sample for sample in samples if sample[0] >= began_s + _SETTLED * length_s]
    times, rate = [time_s for time_s, _ in settled], 0.0
    for time_s, nbytes in settled:
        begin = bisect.bisect_right(times, time_s - _WINDOW * length_s) - 1
        if begin >= 0:
            rate = max(rate, (nbytes - settled[begin][1]) / (time_s - times[begin]))
    rate = rate or (samples[-1][1] - samples[0][1]) / length_s
    if not rate:
        raise ValueError("another host received too few bytes to measure the rate of its link")
    return 1 / rate


def _prepare(sock: socket.socket) -> None:
    """Let a connection not block, take the algorithm of other connections, and be reset when it is closed."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(OSError):  # the kernel's default stays
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
    # Data that the kernel has not sent yet would only take memory.
    sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _CHUNK_NBYTES)


class _Turn:
    """The turn of a host.

    Attributes:
        samples: the samples while the host has sent.
        round_trip_s: the least round trip to the host that receives.
    """

    def __init__(self, to_next: Sequence[socket.socket], from_last: Sequence[socket.socket], turn_s: float) -> None:
        self._to_next, self._from_last = list(to_next), list(from_last)
        self._turn_s = turn_s
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._room = _MOST_NBYTES
        self._received_from: float | None = None
        self.samples: list[Sample] = []
        self.round_trip_s = 0.0

    def run(self, deadline: Deadline, is_over: Callable[[], bool]) -> None:
        """Take the turn; raises the errors of `measured_turn`."""
        for sock in self._to_next[:1]:
            self._watch(sock, select.POLLIN, partial(self._begin, sock))
        for sock in self._from_last:
            self._watch(sock, select.POLLIN, partial(self._receive, sock))
        for sock in self._from_last[:1]:
            sock.send(_READY)
        while self._to_next or self._from_last:
            deadline.checked_remaining_s()
            if is_over():
                raise ConnectionAbortedError("this host has stopped measuring")
            for descriptor, _ in self._poll.poll(1e3 * _LOOK_S):
                if handler := self._handlers.get(descriptor):
                    handler()
            self._look(time.monotonic())

    def _watch(self, sock: socket.socket, event: int, handler: Callable[[], None]) -> None:
        self._poll.register(sock, event)
        self._handlers[sock.fileno()] = handler

    def _begin(self, sock: socket.socket) -> None:
        """Begin to send, because the receiver is ready."""
        with contextlib.suppress(BlockingIOError):
            if sock.recv(1) != _READY:
                raise ConnectionAbortedError("another host has stopped measuring")
            self.samples.append((time.monotonic(), delivered_nbytes(self._to_next)))
            for each in self._to_next:
                self._watch(each, select.POLLOUT, partial(self._send, each))

    def _send(self, sock: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):  # the receiver may have waited long enough
            self._room -= sock.send(_ZEROS)

    def _receive(self, sock: socket.socket) -> None:
        self._received_from = self._received_from or time.monotonic()
        with contextlib.suppress(BlockingIOError):
            try:
                is_open = bool(sock.recv(_CHUNK_NBYTES))
            except ConnectionResetError:
                is_open = False
            if not is_open:
                self._end([sock], self._from_last)

    def _look(self, now_s: float) -> None:
        """Take a sample, and end what has taken long enough."""
        if self._to_next and self.samples and now_s >= self.samples[-1][0] + _LOOK_S:
            self.samples.append((now_s, delivered_nbytes(self._to_next)))
            if now_s >= self.samples[0][0] + self._turn_s or self._room <= 0:
                self.round_trip_s = min(map(least_round_trip_s, self._to_next))
                self._end(list(self._to_next), self._to_next)
        if self._received_from and now_s >= self._received_from + _LONGEST * self._turn_s:
            self._end(list(self._from_last), self._from_last)

    def _end(self, socks: Sequence[socket.socket], of: list[socket.socket]) -> None:
        """Reset some connections, so that nothing of them delays the next turn."""
        for sock in socks:
            self._poll.unregister(sock)
            del self._handlers[sock.fileno()]
            of.remove(sock)
            sock.close()
