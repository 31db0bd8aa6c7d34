"""Where a rank can be reached: its addresses, and the sockets on which it listens.

A rank listens on an abstract Unix socket for ranks of its own host and on a TCP socket for all others. Abstract names
live in the kernel alone, so nothing is left on disk after a SIGKILL. Every connection starts with the hello.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

from unisono.errors import UsageError
from unisono.forks import closed_in_child
from unisono.records import record
from unisono.transports.host.bind_address import SETTING, address_for
from unisono.transports.links.event_loop import Callback, EventLoop
from unisono.transports.links.handshake import Endpoint, Purpose
from unisono.transports.links.handshake_io import BACKLOG, Admit, HandshakeServer

_PENDING_LIMIT = 64
_PENDING_PER_RANK = 4


@record
class Addresses:
    """Where a rank can be reached.

    Attributes:
        host_id: equal on two ranks exactly if `unix` connects them and they can share memory (`transports.locality`).
        unix: name of the abstract Unix socket, without the leading NUL; empty if there is none.
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

    Attributes:
        addresses: where other ranks connect to.
        loop: the event loop of the thread, for connections that this rank opens itself.

    Args:
        key: the job's key, 32 bytes.
        job: the job's id, 16 bytes.
        epoch: the generation of the job's membership.
        rank: this rank.
        size: the number of ranks.
        bind_address: where the other ranks can reach this one, as `interfaces.address_for` takes it.
        host_id: see `Addresses`.
        use_unix: whether ranks of this host may come by the Unix socket; where the system has none, all come by TCP.
        deliver: called in the listener's thread with the peer's hello (as agreed) and the blocking socket, which it
            then owns. It must not block; if it raises, the socket is closed and the error logged.
        on_failure: called in that thread with an error after which it accepts no more connections.

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
        use_unix: bool,
        deliver: Admit,
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._on_failure = on_failure
        self._listening = [_listen_tcp(bind_address)]
        tcp_host, tcp_port = self._listening[0].getsockname()[:2]
        name = f"unisono-{os.urandom(16).hex()}" if use_unix else ""
        self.addresses = Addresses(host_id, name, tcp_host, tcp_port, os.getpid())
        others = frozenset(range(size)) - {rank}
        endpoint = Endpoint(job, epoch, rank, others, frozenset(Purpose) - {Purpose.STORE, Purpose.HOST})
        # All ranks may dial at once, over several lanes; that alone must not look like a crowd of strangers.
        limit = _PENDING_LIMIT + _PENDING_PER_RANK * size
        self._closing = threading.Lock()
        self._closed = False
        try:
            if use_unix:
                self._listening.append(_listen_unix(name))
            self.loop = EventLoop(f"unisono-listener-{rank}", self._break_down)
            self._doorkeeper = HandshakeServer(self.loop, key, endpoint, limit, deliver)
            for listening in self._listening:
                self._doorkeeper.watch(listening)
            self.loop.start()
        except BaseException:
            self._refuse()
            raise

    def close(self, finish: Callback = lambda: None) -> None:
        """Stop listening and end the thread; delivered sockets are not touched. May be called twice.

        Args:
            finish: called in the thread before it ends.
        """

        def stop() -> None:
            self._doorkeeper.close()
            finish()

        with self._closing:
            if self._closed:
                return
            self._closed = True
            self.loop.close(stop)
            self._refuse()

    def _break_down(self, error: Exception) -> None:
        """Refuse whoever dials from now on, instead of leaving it without an answer."""
        self._refuse()
        self._on_failure(error)

    def _refuse(self) -> None:
        for listening in self._listening:
            listening.close()


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


def _listen_unix(name: str) -> socket.socket:
    sock = closed_in_child(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        sock.bind("\0" + name)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock
