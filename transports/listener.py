"""Where a rank can be reached, and how another rank reaches it.

A rank listens on an abstract Unix socket for ranks of its own host and on a TCP socket for all others. Abstract names
live in the kernel alone, so nothing is left on disk after a SIGKILL. Every connection starts with the hello.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from typing import Any

from unisono.errors import CollectiveTimeoutError, PeerLostError, TransportUnavailableError, UsageError
from unisono.forks import closed_in_child
from unisono.records import record
from unisono.transports.doorkeeper import BACKLOG, Admit, Doorkeeper, greet, remaining
from unisono.transports.event_loop import Callback, EventLoop
from unisono.transports.hello import DialerHandshake, Endpoint, HandshakeError, Hello, Purpose
from unisono.transports.interfaces import SETTING, address_for

_PENDING_LIMIT = 64
_PENDING_PER_RANK = 4
_BUSY_PAUSE_S = 0.001


@record
class Addresses:
    """Where a rank can be reached.

    Attributes:
        host_id: equal on two ranks exactly if `unix` connects them and they can share memory (`transports.locality`).
        unix: name of the abstract Unix socket, without the leading NUL.
        tcp_host: numeric IP address.
        tcp_port: port.
        pid: process id, as the process itself sees it.
    """

    host_id: str
    unix: str
    tcp_host: str
    tcp_port: int
    pid: int


class Listener:
    """Accepts the connections of a rank, in a thread of its own, from construction to `close`.

    Args:
        key: the job's key, 32 bytes.
        job: the job's id, 16 bytes.
        epoch: the generation of the job's membership.
        rank: this rank.
        size: the number of ranks.
        bind_address: where the other ranks can reach this one, as `interfaces.address_for` takes it.
        host_id: see `Addresses`.
        deliver: called in the listener's thread with the peer's hello (as agreed) and the blocking socket, which it
            then owns. It must not block; if it raises, the socket is closed and the error logged.

    Raises:
        UsageError: `bind_address` cannot be listened on, or stands for no particular interface.
    """

    def __init__(
        self,
        *,
        key: bytes,
        job: bytes,
        epoch: int,
        rank: int,
        size: int,
        bind_address: str,
        host_id: str,
        deliver: Admit,
    ) -> None:
        self._tcp = _listen_tcp(bind_address)
        self._unix, name = _listen_unix()
        tcp_host, tcp_port = self._tcp.getsockname()[:2]
        self.addresses = Addresses(host_id, name, tcp_host, tcp_port, os.getpid())
        others = frozenset(range(size)) - {rank}
        endpoint = Endpoint(job, epoch, rank, others, frozenset(Purpose) - {Purpose.STORE, Purpose.HOST})
        self._loop = EventLoop(f"unisono-listener-{rank}")
        # All ranks may dial at once, over several lanes; that alone must not look like a crowd of strangers.
        self._doorkeeper = Doorkeeper(self._loop, key, endpoint, _PENDING_LIMIT + _PENDING_PER_RANK * size, deliver)
        self._doorkeeper.watch(self._tcp)
        self._doorkeeper.watch(self._unix)
        self._closing = threading.Lock()
        self._closed = False
        self._loop.start()

    def call_soon(self, callback: Callback) -> None:
        """Call `callback` in the listener's thread, unless that has ended. It takes no lock: finalizers may call it."""
        with contextlib.suppress(OSError):
            self._loop.submit(callback)

    def close(self) -> None:
        """Stop listening and end the thread; delivered sockets are not touched. May be called twice."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._loop.close(self._doorkeeper.close)
            self._tcp.close()
            self._unix.close()


def _listen_tcp(bind_address: str) -> socket.socket:
    host = address_for(bind_address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if not any(socket.inet_pton(family, host.partition("%")[0])):
        raise UsageError(f"{SETTING}={bind_address!r} names no interface: give one that other ranks can connect to")
    sock = closed_in_child(socket.socket(family, socket.SOCK_STREAM))
    try:
        sock.bind((host, 0))
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise UsageError(f"{SETTING}={bind_address!r} cannot be listened on: {error.strerror or error}") from None
    return sock


def _listen_unix() -> tuple[socket.socket, str]:
    name = f"unisono-{os.urandom(16).hex()}"
    sock = closed_in_child(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    sock.bind("\0" + name)
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock, name


def dial(
    addresses: Addresses,
    *,
    key: bytes,
    job: bytes,
    epoch: int,
    rank: int,
    peer: int,
    purpose: Purpose,
    communicator: int = 0,
    lane: int = 0,
    use_unix: bool,
    timeout_s: float,
) -> tuple[socket.socket, Hello]:
    """Connect to rank `peer` at `addresses`; return the blocking socket and the peer's hello, as agreed.

    Args:
        addresses: where the peer listens.
        key: the job's key, 32 bytes.
        job: the job's id, 16 bytes.
        epoch: the generation of the job's membership.
        rank: this rank.
        peer: the rank that must answer.
        purpose: what the connection is for.
        communicator: the communicator that it will serve, or 0.
        lane: the lane that it will serve, or 0.
        use_unix: whether to take the Unix socket, which needs an equal `Addresses.host_id`, or TCP.
        timeout_s: seconds for all of it.

    Raises:
        PeerLostError: nobody listens there, or the peer closed the connection.
        CollectiveTimeoutError: the peer did not answer in time.
        TransportUnavailableError: the peer cannot be reached from here, or is not the one that is wanted.
    """
    handshake = DialerHandshake(key, Hello(job, epoch, rank, peer, purpose, communicator, lane))
    deadline = time.monotonic() + timeout_s
    where = f"unix:{addresses.unix}" if use_unix else f"{addresses.tcp_host} port {addresses.tcp_port}"
    facts: dict[str, Any] = {"rank": rank, "peer": peer}
    try:
        sock = _connect(addresses, use_unix, deadline)
        try:
            return sock, greet(sock, handshake, deadline)
        except BaseException:
            sock.close()
            raise
    except HandshakeError as error:
        raise TransportUnavailableError(f"rank {peer} at {where} refused: {error.message}", **facts) from error
    except TimeoutError:
        message = f"rank {peer} at {where} did not answer within {timeout_s:g} s"
        raise CollectiveTimeoutError(message, **facts) from None
    except ConnectionError as error:
        raise PeerLostError(f"rank {peer} at {where} is gone: {error.strerror or error}", **facts) from error
    except OSError as error:
        raise TransportUnavailableError(f"rank {peer} at {where} cannot be reached: {error}", **facts) from error


def _connect(addresses: Addresses, use_unix: bool, deadline: float) -> socket.socket:
    if not use_unix:
        family = socket.AF_INET6 if ":" in addresses.tcp_host else socket.AF_INET
        sock = closed_in_child(socket.socket(family, socket.SOCK_STREAM))
        try:
            sock.settimeout(remaining(deadline))
            sock.connect((addresses.tcp_host, addresses.tcp_port))
            return sock
        except BaseException:
            sock.close()
            raise
    while True:
        sock = closed_in_child(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            sock.settimeout(remaining(deadline))
            sock.connect("\0" + addresses.unix)
            return sock
        except BaseException as error:
            sock.close()
            # Unlike TCP, a Unix socket with a full backlog refuses at once, and it is for the caller to try again.
            if not (isinstance(error, OSError) and error.errno == errno.EAGAIN):
                raise
        time.sleep(_BUSY_PAUSE_S)
