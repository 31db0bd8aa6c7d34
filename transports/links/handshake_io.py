"""The handshake over sockets: `HandshakeServer` for the side that accepts, `greet` for the side that dials.

If both sides agree on TLS, it begins at the end of the handshake (tcp/tls.py).

Anybody may connect. A connection by TCP that does not complete the handshake is closed after five seconds at most, and
after one second if it has not sent a HELLO. Until then it takes a bounded amount of memory, and its only other effect
is a line in the debug log. All of them together take a quarter of the free descriptors at most. Only processes of this
user connect by a Unix socket. They have no time limit, because one of them may wait for its core for many seconds.
"""

from __future__ import annotations

import dataclasses
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from functools import partial

from unisono.errors import TransportUnavailableError
from unisono.foundation import log
from unisono.foundation.deadlines import Deadline
from unisono.foundation.forks import closed_in_child
from unisono.transports.host.fd_limit import free_descriptors
from unisono.transports.host.system_limits import is_exhausted
from unisono.transports.links.event_loop import EventLoop, Timer
from unisono.transports.links.handshake import AcceptorHandshake, Admission, DialerHandshake, HandshakeError, Hello
from unisono.transports.tcp.tls import TlsHandshake, TlsPolicy

HANDSHAKE_TIMEOUT_S = 5.0
HELLO_TIMEOUT_S = 1.0
BACKLOG = 4096

_CREDENTIALS = struct.Struct("iII")
_EXHAUSTED_PAUSE_S = 0.01
# Connections without a complete handshake take at most one in _SHARE of the free descriptors. The free ones are counted
# again after _COUNT_S.
_SHARE = 4
_COUNT_S = 0.05
_STARVED_S = 2.0

_log = log.get("links")

Admit = Callable[[Hello, socket.socket], None]


class HandshakeAcceptor:
    """Accepts connections in an event loop. The loop fails if accepting lacks descriptors for 2 seconds.

    Args:
        loop: the event loop.
        listening: the listening socket; the caller closes it.
        take: called in the loop's thread with each connection, which is nonblocking and which it then owns.
        free_one: closes a descriptor, if it can, and returns whether it has.
    """

    def __init__(
        self,
        loop: EventLoop,
        listening: socket.socket,
        take: Callable[[socket.socket], None],
        free_one: Callable[[], bool] = lambda: False,
    ) -> None:
        self._loop = loop
        self._listening = listening
        self._take = take
        self._free_one = free_one
        self._starved: Deadline | None = None
        loop.watch(listening, self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listening.accept()
        except BlockingIOError:
            return
        except OSError as error:
            _log.debug("could not accept a connection: %s", error)
            if is_exhausted(error) and not self._free_one():
                self._starve(error)
            return
        self._starved = None
        sock.setblocking(False)
        self._take(closed_in_child(sock))

    def _starve(self, error: OSError) -> None:
        """Wait a moment for other threads to close a descriptor, because none is free.

        Fail the loop after `_STARVED_S` seconds.
        """
        self._starved = self._starved or Deadline(_STARVED_S)
        if self._starved.has_passed():
            self._loop.fail(error)
        else:
            time.sleep(_EXHAUSTED_PAUSE_S)


class HandshakeServer:
    """Accepts connections in an event loop and admits those that complete the handshake.

    Args:
        loop: the event loop.
        key: the job's key.
        admission: the identity of this process, and the connections that it admits.
        limit: the number of handshakes that may run at once, if enough descriptors are free. One more connection drops
            the oldest of those that have sent no HELLO, or else the oldest of all.
        admit: called in the loop's thread with the agreed HELLO of the peer and its blocking socket, which it then
            owns. If it raises, the socket is closed and the error logged.
        tls: which connections use TLS; by default none.
    """

    def __init__(
        self,
        loop: EventLoop,
        key: bytes,
        admission: Admission,
        limit: int,
        admit: Admit,
        tls: TlsPolicy | None = None,
    ) -> None:
        self._loop = loop
        self._key = key
        self._admission = admission
        self._limit = limit
        self._admit = admit
        self._tls = tls or TlsPolicy()
        # In order, each with the end of its time, if it has one; and those without a HELLO, with the end of that time.
        self._pending: dict[socket.socket, Timer | None] = {}
        self._silent: dict[socket.socket, Timer | None] = {}
        self._allowed = limit
        self._counted = Deadline(0.0)  # the end of the time for which `_allowed` holds

    def watch(self, listening: socket.socket) -> None:
        """Accept connections on `listening`, which the caller closes."""
        HandshakeAcceptor(self._loop, listening, self.take, self._drop_oldest)

    def close(self) -> None:
        """Drop all connections whose handshake is not complete."""
        for sock in list(self._pending):
            self._drop(sock, "the listener is closed")

    def take(self, sock: socket.socket) -> None:
        """Begin the handshake on a nonblocking connection, which it then owns. Called in the loop's thread."""
        if not _same_user(sock):
            _log.debug("refused a connection of another user")
            sock.close()
            return
        while len(self._pending) >= self._most_pending():
            self._drop_oldest()
        try:
            features = self._tls.features(sock)
        except TransportUnavailableError as error:  # the dialer learns that there is no TLS here
            _log.warning("a connection cannot be encrypted: %s", error.message)
            features = 0
        except OSError as error:  # the stranger has gone
            _log.debug("dropped a connection: %s", error)
            sock.close()
            return
        handshake = AcceptorHandshake(self._key, dataclasses.replace(self._admission, features=features))
        self._loop.watch(sock, partial(self._receive, sock, handshake))
        self._pending[sock] = self._drop_after(HANDSHAKE_TIMEOUT_S, sock, "no handshake in time")
        self._silent[sock] = self._drop_after(HELLO_TIMEOUT_S, sock, "no HELLO in time")

    def _drop_after(self, seconds: float, sock: socket.socket, reason: str) -> Timer | None:
        """Drop a connection after a time, unless the other side is a process of this user and this host."""
        is_stranger = sock.family != socket.AF_UNIX
        return self._loop.call_after(seconds, partial(self._drop, sock, reason)) if is_stranger else None

    def _most_pending(self) -> int:
        """Return how many handshakes may run at once now: at least one."""
        if self._counted.has_passed():
            self._counted = Deadline(_COUNT_S)
            free = free_descriptors()
            share = self._limit if free is None else (free + len(self._pending)) // _SHARE
            self._allowed = max(1, min(self._limit, share))
        return self._allowed

    def _receive(self, sock: socket.socket, handshake: AcceptorHandshake) -> None:
        if sock not in self._pending:  # dropped by an earlier callback of the same wake-up
            return
        try:
            # A new connection has room for these few bytes. If it has none, it is dropped like a stranger.
            reply = handshake.receive(sock.recv(handshake.needed))
            if reply:
                self._end_silence(sock)
            _send_at_once(sock, reply)
        except HandshakeError as error:
            self._drop(sock, error.message, error.reply)
        except OSError as error:
            self._drop(sock, str(error))
        else:
            if handshake.done and handshake.uses_tls:
                self._begin_tls(sock, handshake)
            elif handshake.done:
                self._let_in(sock, handshake.agreed)

    def _begin_tls(self, sock: socket.socket, handshake: AcceptorHandshake) -> None:
        try:
            tls = TlsHandshake(self._tls, sock, handshake.secret, is_client=False)
        except HandshakeError as error:
            _log.warning("a connection could not be made: %s", error.message)
            self._drop(sock, error.message)
            return
        except OSError as error:
            self._drop(sock, str(error))
            return
        self._loop.watch(sock, partial(self._advance_tls, sock, tls, handshake.agreed))

    def _advance_tls(self, sock: socket.socket, tls: TlsHandshake, hello: Hello) -> None:
        if sock not in self._pending:
            return
        try:
            is_complete = tls.advance()
            if is_complete:
                self._tls.check(hello.sender, tls.certificate)
        except HandshakeError as error:
            _log.warning("a connection could not be made: %s", error.message)
            self._drop(sock, error.message)
        except OSError as error:
            self._drop(sock, str(error))
        else:
            if is_complete:
                self._let_in(sock, hello, tls)

    def _let_in(self, sock: socket.socket, hello: Hello, tls: TlsHandshake | None = None) -> None:
        self._forget(sock)
        self._loop.unwatch(sock)
        if tls is not None:
            sock = tls.take_socket()
        try:
            prepare(sock)
            self._admit(hello, sock)
        except Exception:
            sock.close()
            raise

    def _drop_oldest(self) -> bool:
        oldest = next(iter(self._silent or self._pending), None)
        if oldest is None:
            return False
        self._drop(oldest, "too many handshakes at once")
        return True

    def _drop(self, sock: socket.socket, reason: str, reply: bytes = b"") -> None:
        if sock not in self._pending:
            return
        self._forget(sock)
        _log.debug("dropped a connection: %s", reason)
        try:
            _send_at_once(sock, reply)
        except OSError as error:
            _log.debug("could not send the reason: %s", error)
        self._loop.unwatch(sock)
        sock.close()

    def _forget(self, sock: socket.socket) -> None:
        self._end_silence(sock)
        self._cancel(self._pending.pop(sock))

    def _end_silence(self, sock: socket.socket) -> None:
        self._cancel(self._silent.pop(sock, None))

    def _cancel(self, timer: Timer | None) -> None:
        if timer is not None:
            self._loop.cancel(timer)


def greet(
    sock: socket.socket, handshake: DialerHandshake, deadline: Deadline, tls: TlsPolicy | None = None
) -> socket.socket:
    """Run the dialer's handshake on a connected socket; return the socket to use, which blocks.

    If the acceptor agrees on TLS, the returned socket encrypts what it sends, and has taken over the other one.

    Raises:
        HandshakeError: the acceptor is another process than expected.
        ConnectionError: the acceptor closed the connection.
        TimeoutError: `deadline` has passed.
    """
    reply = handshake.opening
    while not handshake.done:
        sock.settimeout(deadline.checked_remaining_s())
        sock.sendall(reply)
        data = sock.recv(handshake.needed)
        if not data:
            raise ConnectionResetError("it closed the connection during the handshake")
        reply = handshake.receive(data)
    if handshake.uses_tls:
        sock.sendall(reply)
        sock = _encrypted(sock, TlsHandshake(tls or TlsPolicy(), sock, handshake.secret, is_client=True), deadline)
    prepare(sock)
    return sock


def _encrypted(sock: socket.socket, tls: TlsHandshake, deadline: Deadline) -> socket.socket:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while not tls.advance():
        poll.poll(1e3 * deadline.checked_remaining_s())
    return tls.take_socket()


def prepare(sock: socket.socket) -> None:
    """Make `sock` blocking, without a timeout, and send small messages at once."""
    sock.settimeout(None)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _send_at_once(sock: socket.socket, data: bytes) -> None:
    if data and sock.send(data) != len(data):
        raise BlockingIOError("the connection takes no bytes")


def _same_user(sock: socket.socket) -> bool:
    if sock.family != socket.AF_UNIX:
        return True
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return uid in (0, os.geteuid())
