"""Connects this rank to the listeners of other ranks: while the caller waits, or in the background.

A `Connection` is one attempt: a socket that connects and runs the handshake step by step, without blocking. `dial`
drives one connection while its caller waits. A `Dialer` drives many in an event loop, for channels. No thread waits for
it, because a call waits for its channel as it waits for a message, with its own deadline. So a `Dialer` has no time
limit: it tries again as long as the peer may still answer, because a rank that computes or is stopped answers later.
"""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import field
from functools import partial
from typing import Any, Protocol

from unisono.errors import CollectiveTimeoutError, PeerLostError, TransportUnavailableError, UnisonoError
from unisono.foundation.deadlines import Deadline
from unisono.foundation.forks import closed_in_child
from unisono.foundation.records import record
from unisono.transports.host.system_limits import unavailable
from unisono.transports.links.event_loop import EventLoop, Timer
from unisono.transports.links.handshake import NO_RANK, DialerHandshake, HandshakeError, Hello, Purpose
from unisono.transports.links.handshake_io import prepare
from unisono.transports.links.listener import Addresses
from unisono.transports.tcp.tls import TlsHandshake, TlsPolicy

_PAUSE_S = 0.001
_REDIAL_PAUSE_S = 0.01
# An acceptor that lacks descriptors, or is at its limit of handshakes, drops connections without an answer. A dialer
# that gets no answer for the first time tries again. The time doubles with each attempt, up to the second value.
# A dialer that has been answered does not give up: the acceptor may have admitted it already, and would take the end of
# the connection for the end of this rank. Where many ranks share few cores, the last message may take many seconds.
_PATIENCE_S = (5.0, 60.0)
# After this time, a second attempt to open a broken connection anew begins beside the first one. The network may be
# back by then, and the kernel repeats the lost packet of the first attempt only seconds later. So many run at once.
_URGENT_S = 0.25
_MOST_AT_ONCE = 2
# A network that fails for a moment may have no route. If the peer's host is lost, heartbeats say so before this time.
_NO_ROUTE_S = 10.0
# How long one attempt may take to get a connection through other processes.
_WAY_S = 10.0
_NO_ROUTE = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN})


class Ways(Protocol):
    """Reaches ranks of which this rank cannot dial some, such as ranks behind a router. Several threads may use it."""

    def is_direct(self, peer: int) -> bool:
        """Return whether this rank dials a peer at its address, as far as is known now."""

    def connect(self, peer: int, port: int, timeout_s: float) -> socket.socket | None:
        """Return a connection to the listener of a peer at a port, or None if this rank must dial it.

        Raises:
            ConnectionRefusedError: the peer has ended.
            OSError: there is no way to it now.
        """

    def shown(self, peer: int) -> str:
        """Return the way to a peer in words; empty if it is direct."""


@record
class Target:
    """The rank to connect to, and the use of the connection.

    Attributes:
        peer: the rank that must answer.
        addresses: the addresses of its listener.
        use_unix: whether to connect to its Unix socket, which needs an equal `Addresses.host_id`, instead of TCP.
        purpose: the use of the connection.
        communicator, lane: the communicator and the lane that it will carry; 0 where they have no meaning.
    """

    peer: int
    addresses: Addresses
    use_unix: bool
    purpose: Purpose
    communicator: int = 0
    lane: int = 0


@record
class DialingRank:
    """The rank that connects.

    Attributes:
        key: the job's key, which it proves to hold.
        job, epoch, rank: its job, the generation of its membership, and its number.
        tls: which of its connections use TLS.
        ways: the ways to ranks that it cannot dial; None if it dials all.
    """

    key: bytes
    job: bytes
    epoch: int
    rank: int
    tls: TlsPolicy = field(default_factory=TlsPolicy)
    ways: Ways | None = None

    def dials(self, target: Target) -> bool:
        """Return whether this rank reaches a target by dialling its address."""
        return target.use_unix or self.ways is None or self.ways.is_direct(target.peer)

    def connected(self, target: Target, timeout_s: float) -> socket.socket | None:
        """Return a connection to a target that this rank does not dial; None if it must dial it after all.

        Raises:
            PeerLostError: the target has ended, or there is no way to it now.
            TransportUnavailableError: this rank cannot reach it.
        """
        assert self.ways is not None
        try:
            return self.ways.connect(target.peer, target.addresses.tcp_port, timeout_s)
        except OSError as error:
            raise _error_of(self, target, error) from error


class Connection:
    """One attempt to connect and to run the handshake. It never blocks.

    Args:
        caller: this rank.
        target: the rank that must answer.
        sock: a connection to the target; by default it is dialled.

    Attributes:
        sock: the nonblocking socket. Call `advance` when it can be written while `is_connecting`, and later when it can
            be read.

    Raises:
        BlockingIOError: the queue of the peer's Unix socket is full.
        UnisonoError: the same errors as `advance`.
    """

    def __init__(self, caller: DialingRank, target: Target, sock: socket.socket | None = None) -> None:
        self._caller, self._target = caller, target
        self._handshake: DialerHandshake | None = None
        self._tls: TlsHandshake | None = None
        self.is_connecting = True
        if sock is not None:
            sock.setblocking(False)
            self.sock = sock
            return
        address: Any
        family, address = _address_of(target)
        try:
            self.sock = closed_in_child(socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
        except OSError as error:
            raise self._error(error) from error
        code = self.sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            self.sock.close()
            if code == errno.EAGAIN:
                raise BlockingIOError(code, os.strerror(code))
            failure = OSError(code, os.strerror(code))
            raise self._error(failure) from failure

    @property
    def is_answered(self) -> bool:
        """Whether the peer has answered the HELLO. This rank has then sent its proof, and the peer may admit it."""
        return self._handshake is not None and self._handshake.is_answered

    def advance(self) -> Hello | None:
        """Advance as far as is possible now; return the peer's agreed HELLO once the handshake is complete, else None.

        After that the socket blocks. With TLS, `sock` is another one then.

        Raises:
            PeerLostError: nobody listens at the address, or the peer closed the connection.
            TransportUnavailableError: this rank cannot reach the peer, or another process answers there.
        """
        try:
            return self._advance()
        except BlockingIOError:
            return None
        except (OSError, HandshakeError) as error:
            raise self._error(error) from error

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()

    def _advance(self) -> Hello | None:
        handshake = self._handshake = self._handshake or self._begin()
        while not handshake.done:
            data = self.sock.recv(handshake.needed)
            if not data:
                raise ConnectionResetError("it closed the connection during the handshake")
            if reply := handshake.receive(data):
                self.sock.sendall(reply)  # a new connection has room for these few bytes
        if handshake.uses_tls:
            if self._tls is None:
                self._tls = TlsHandshake(self._caller.tls, self.sock, handshake.secret, is_client=True)
            if not self._tls.advance():
                return None
            self._caller.tls.check(self._target.peer, self._tls.certificate)
            self.sock = self._tls.take_socket()
        prepare(self.sock)
        return handshake.agreed

    def _begin(self) -> DialerHandshake:
        """Send the HELLO; raises OSError if the connection could not be made."""
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        caller, target = self._caller, self._target
        hello = Hello(
            caller.job,
            caller.epoch,
            caller.rank,
            target.peer,
            target.purpose,
            target.communicator,
            target.lane,
            features=caller.tls.features(self.sock),
        )
        handshake = DialerHandshake(caller.key, hello)
        self.sock.sendall(handshake.opening)
        self.is_connecting = False
        return handshake

    def _error(self, error: OSError | HandshakeError) -> UnisonoError:
        return _error_of(self._caller, self._target, error)


def _error_of(caller: DialingRank, target: Target, error: OSError | HandshakeError) -> UnisonoError:
    peer = shown(target)
    facts: dict[str, Any] = {"rank": caller.rank, "peer": target.peer}
    if isinstance(error, HandshakeError):
        return TransportUnavailableError(f"{peer} refused: {error.message}", **facts)
    if isinstance(error, ConnectionError):
        return PeerLostError(f"{peer} is gone: {error.strerror or error}", **facts)
    return unavailable(f"{peer} cannot be reached by rank {caller.rank}", error, **facts)


def dial(
    caller: DialingRank,
    target: Target,
    timeout_s: float,
    sock: socket.socket | None = None,
    *,
    answer_s: float = math.inf,
) -> tuple[socket.socket, Hello]:
    """Connect to a rank; return the blocking socket and the peer's agreed HELLO.

    Args:
        caller: this rank.
        target: the rank that must answer.
        timeout_s: seconds until the handshake must be complete.
        sock: a connection to the target, which is closed on an error; by default it is dialled.
        answer_s: seconds until the peer must have answered the HELLO, if that is less.

    Raises:
        CollectiveTimeoutError: the peer did not answer in time.
        PeerLostError, TransportUnavailableError: for the reasons of `Connection.advance`.
    """
    answer_s = min(answer_s, timeout_s)
    deadline, answered_by = Deadline(timeout_s), Deadline(answer_s)
    try:
        connection = _begun(caller, target, answered_by) if sock is None else Connection(caller, target, sock)
        try:
            while (hello := _next(connection, deadline if connection.is_answered else answered_by)) is None:
                pass
        except BaseException:
            connection.close()
            raise
        return connection.sock, hello
    except TimeoutError:
        message = f"{shown(target)} did not answer within {answer_s:.3g} s"
        raise CollectiveTimeoutError(message, rank=caller.rank, peer=target.peer) from None


class Dialer:
    """Connects to other ranks in an event loop, until `close`.

    Args:
        loop: the event loop.
        caller: this rank.
        gives_up: called before each further attempt; returns True if the connection is not needed any more.
    """

    def __init__(self, loop: EventLoop, caller: DialingRank, gives_up: Callable[[], bool]) -> None:
        self._loop = loop
        self._caller = caller
        self._gives_up = gives_up
        self._connections: dict[Connection, Timer] = {}  # each with the end of its time
        self._closing = threading.Lock()
        self._closed = False

    def dial(
        self,
        target: Target,
        on_connected: Callable[[socket.socket], None],
        on_error: Callable[[UnisonoError], None],
        *,
        is_urgent: bool = False,
    ) -> None:
        """Connect in the background, with as many attempts as it takes. Any thread may call this.

        Args:
            target: the rank that must answer.
            on_connected: called in the loop's thread with the blocking socket, which it then owns.
            on_error: called in the loop's thread instead, with a PeerLostError if the peer has died, or a
                TransportUnavailableError if it cannot be reached at all.
            is_urgent: whether a packet that the network loses must not delay the connection by seconds.
        """
        self._loop.submit(partial(self._begin, _Attempts(target, on_connected, on_error, is_urgent)))

    def close(self) -> None:
        """Drop all connections whose handshake is not complete. Called in the loop's thread."""
        with self._closing:
            self._closed = True
        for connection in list(self._connections):
            self._drop(connection)

    def _begin(self, attempts: _Attempts) -> None:
        if self._closed or attempts.over or (attempts.count and self._gives_up()):
            return
        attempts.count += 1
        if self._caller.dials(attempts.target):
            self._start(attempts, None)
        else:
            threading.Thread(target=self._connect, args=(attempts,), name="unisono-way", daemon=True).start()

    def _connect(self, attempts: _Attempts) -> None:
        """Get a connection to a target that this rank does not dial, in a thread of its own."""
        try:
            sock = self._caller.connected(attempts.target, _WAY_S)
        except UnisonoError as error:
            self._loop.submit(partial(self._failed, attempts, error))
            return
        with self._closing:  # a loop that is closed runs no callback, which would close the connection
            if not self._closed:
                self._loop.submit(partial(self._start, attempts, sock))
                return
        if sock is not None:
            sock.close()

    def _start(self, attempts: _Attempts, sock: socket.socket | None) -> None:
        if self._closed or attempts.over:
            if sock is not None:
                sock.close()
            return
        try:
            connection = Connection(self._caller, attempts.target, sock)
        except BlockingIOError:
            self._loop.call_after(_PAUSE_S, partial(self._begin, attempts))
            return
        except UnisonoError as error:
            self._failed(attempts, error)
            return
        self._loop.watch(connection.sock, partial(self._advance, attempts, connection), writable=True)
        if len(attempts.running) == _MOST_AT_ONCE:
            self._drop(attempts.running.pop(0))
        attempts.running.append(connection)
        if attempts.is_urgent:
            self._connections[connection] = self._loop.call_after(_URGENT_S, partial(self._hurry, attempts, connection))
        else:
            self._let_answer(attempts, connection)

    def _let_answer(self, attempts: _Attempts, connection: Connection) -> None:
        expire = partial(self._expire, attempts, connection)
        self._connections[connection] = self._loop.call_after(attempts.next_patience_s(), expire)

    def _hurry(self, attempts: _Attempts, connection: Connection) -> None:
        """Begin a second attempt while the first one goes on, because the peer's host has not answered it."""
        if connection.is_connecting:
            self._begin(attempts)
        else:
            self._let_answer(attempts, connection)

    def _advance(self, attempts: _Attempts, connection: Connection) -> None:
        if connection not in self._connections:  # dropped by an earlier callback of the same wake-up
            return
        descriptor = connection.sock.fileno()  # of the socket that TLS may take over
        try:
            hello = connection.advance()
        except UnisonoError as error:
            self._drop(connection)
            attempts.running.remove(connection)
            self._failed(attempts, error)
            return
        if hello is None:
            self._loop.watch(connection.sock, partial(self._advance, attempts, connection))
            return
        self._loop.cancel(self._connections.pop(connection))
        self._loop.unwatch(descriptor)
        attempts.running.remove(connection)
        self._end(attempts)
        attempts.on_connected(connection.sock)

    def _expire(self, attempts: _Attempts, connection: Connection) -> None:
        if connection in self._connections and not connection.is_answered:
            self._drop(connection)
            attempts.running.remove(connection)
            self._begin(attempts)

    def _failed(self, attempts: _Attempts, error: UnisonoError) -> None:
        """Try again if the peer dropped the connection, which a busy peer does. A dead peer refuses it.

        Also try again for some seconds if there is no route to the peer.
        """
        dropped = isinstance(error, PeerLostError) and not isinstance(error.__cause__, ConnectionRefusedError)
        if (dropped or attempts.awaits_route(error)) and not self._gives_up():
            self._loop.call_after(_REDIAL_PAUSE_S, partial(self._begin, attempts))
        else:
            self._end(attempts)
            attempts.on_error(error)

    def _end(self, attempts: _Attempts) -> None:
        attempts.over = True
        for connection in attempts.running:
            self._drop(connection)
        attempts.running.clear()

    def _drop(self, connection: Connection) -> None:
        self._loop.cancel(self._connections.pop(connection))
        self._loop.unwatch(connection.sock)
        connection.close()


class _Attempts:
    """The attempts to reach one target.

    Attributes:
        is_urgent: whether a lost packet must not delay the connection by seconds.
        count: the number of attempts that have begun.
        running: the connections of attempts that have neither succeeded nor failed, the oldest first.
        over: whether an attempt has succeeded, or the dialer has given up.
    """

    def __init__(
        self,
        target: Target,
        on_connected: Callable[[socket.socket], None],
        on_error: Callable[[UnisonoError], None],
        is_urgent: bool,
    ) -> None:
        self.target, self.on_connected, self.on_error = target, on_connected, on_error
        self.count = 0
        self.running: list[Connection] = []
        self.over = False
        self.is_urgent = is_urgent
        self._patience_s, self._longest_s = _PATIENCE_S
        self._route_until: Deadline | None = None

    def awaits_route(self, error: UnisonoError) -> bool:
        """Return whether `error` says that no route to the target exists, and the first such error is seconds old."""
        if getattr(error.__cause__, "errno", None) not in _NO_ROUTE:
            return False
        self._route_until = self._route_until or Deadline(_NO_ROUTE_S)
        return not self._route_until.has_passed()

    def next_patience_s(self) -> float:
        """Return the seconds after which the next attempt counts as dropped."""
        patience_s = self._patience_s
        self._patience_s = min(2 * patience_s, self._longest_s)
        return patience_s


def _begun(caller: DialingRank, target: Target, deadline: Deadline) -> Connection:
    if not caller.dials(target):
        return Connection(caller, target, caller.connected(target, deadline.checked_remaining_s()))
    while True:
        try:
            return Connection(caller, target)
        except BlockingIOError:
            time.sleep(min(_PAUSE_S, deadline.checked_remaining_s()))


def _next(connection: Connection, deadline: Deadline) -> Hello | None:
    """Wait until the connection can advance, and advance it."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLOUT if connection.is_connecting else select.POLLIN)
    while not poll.poll(1e3 * deadline.checked_remaining_s()):
        pass
    return connection.advance()


def _address_of(target: Target) -> tuple[socket.AddressFamily, Any]:
    if target.use_unix:
        return socket.AF_UNIX, "\0" + target.addresses.unix
    host = target.addresses.tcp_host
    return socket.AF_INET6 if ":" in host else socket.AF_INET, (host, target.addresses.tcp_port)


def shown(target: Target) -> str:
    """Return the rank and the address of a target, for errors."""
    addresses = target.addresses
    address = f"unix:{addresses.unix}" if target.use_unix else f"{addresses.tcp_host} port {addresses.tcp_port}"
    return f"{'the process' if target.peer == NO_RANK else f'rank {target.peer}'} at {address}"
