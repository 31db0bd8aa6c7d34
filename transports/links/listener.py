"""The listener of a rank: the sockets on which it accepts connections, and their addresses.

A rank listens on an abstract Unix socket for ranks of its own host, and on a TCP socket for all others. An abstract
name exists only in the kernel, so no file remains after a SIGKILL. Every connection starts with the handshake.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from functools import partial

from unisono.errors import UsageError
from unisono.foundation.forks import closed_in_child
from unisono.foundation.records import record
from unisono.transports.host.bind_address import SETTING, address_for, not_listened_on
from unisono.transports.links.event_loop import Callback, EventLoop
from unisono.transports.links.handshake import Admission, Purpose
from unisono.transports.links.handshake_io import BACKLOG, Admit, HandshakeServer
from unisono.transports.tcp.tls import TlsPolicy

_PENDING_LIMIT = 64
_PENDING_PER_RANK = 4
# The store, the first rank of a host, a process that waits to join and a member of a swarm have listeners of their own.
_OF_OTHER_LISTENERS = {Purpose.STORE, Purpose.HOST, Purpose.JOIN, Purpose.SWARM, Purpose.STREAM}


@record
class Addresses:
    """The addresses of the listener of a rank.

    Attributes:
        host_id: equal on two ranks exactly if `unix` connects them and they can share memory (`host_discovery.py`).
        unix: name of the abstract Unix socket, without the leading NUL; empty if there is none.
        tcp_host: numeric IP address.
        tcp_port: port.
        pid: the process id, in the pid namespace of the rank.
    """

    host_id: str
    unix: str
    tcp_host: str
    tcp_port: int
    pid: int


class Listener:
    """Accepts the connections of a rank, in a thread of its own, from construction to `close`.

    Attributes:
        addresses: the addresses to which other ranks connect.
        loop: the event loop of the thread; this rank also opens its own connections there.

    Args:
        key: the job's key, 32 bytes.
        job: the job's id, 16 bytes.
        epoch: the generation of the job's membership.
        rank: this rank.
        size: the number of ranks.
        bind_address: the address to listen on, in a form that `bind_address.address_for` accepts.
        host_id: the value of `Addresses.host_id`.
        use_unix: whether to listen on a Unix socket too. It is False where ranks can share no memory.
        deliver: called in the listener's thread with the peer's agreed HELLO and its blocking socket, which it then
            owns. It must not block. If it raises, the socket is closed and the error logged.
        on_failure: called in that thread with the error after which the listener accepts no more connections.
        tls: which connections use TLS; by default none.

    Raises:
        UsageError: the listener cannot listen on `bind_address`, or the address means no particular interface.
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
        tls: TlsPolicy | None = None,
    ) -> None:
        self._on_failure = on_failure
        self._listening = [listen_tcp(bind_address)]
        tcp_host, tcp_port = self._listening[0].getsockname()[:2]
        name = f"unisono-{os.urandom(16).hex()}" if use_unix else ""
        self.addresses = Addresses(host_id, name, tcp_host, tcp_port, os.getpid())
        others = frozenset(range(size)) - {rank}
        admission = Admission(job, epoch, rank, others, frozenset(Purpose) - _OF_OTHER_LISTENERS)
        # All ranks may dial at once, over several lanes. The limit must admit them, and still bound strangers.
        limit = _PENDING_LIMIT + _PENDING_PER_RANK * size
        self._closing = threading.Lock()
        self._closed = False
        try:
            if use_unix:
                self._listening.append(_listen_unix(name))
            self.loop = EventLoop(f"unisono-listener-{rank}", self._break_down)
            self._handshakes = HandshakeServer(self.loop, key, admission, limit, deliver, tls)
            for listening in self._listening:
                self._handshakes.watch(listening)
            self.loop.start()
        except BaseException:
            self._refuse()
            raise

    def close(self, finish: Callback = lambda: None) -> None:
        """Stop listening and end the thread. Delivered sockets stay open. May be called twice.

        Args:
            finish: called in the thread before it ends.
        """

        def stop() -> None:
            self._handshakes.close()
            finish()

        with self._closing:
            if self._closed:
                return
            self._closed = True
            self.loop.close(stop)
            self._refuse()

    def take(self, sock: socket.socket) -> None:
        """Take over a connection that another process has made, and close it once this listener is closed."""
        with self._closing:
            if not self._closed:
                self.loop.submit(partial(self._handshakes.take, sock))
                return
        sock.close()

    def _break_down(self, error: Exception) -> None:
        """Refuse later connections, so that ranks that dial get an error instead of no answer."""
        self._refuse()
        self._on_failure(error)

    def _refuse(self) -> None:
        for listening in self._listening:
            listening.close()


def listen_tcp(bind_address: str) -> socket.socket:
    """Return a nonblocking socket that listens on a free port of an address, which has the forms of the option.

    Raises:
        UsageError: the address cannot be listened on, or means no particular interface.
    """
    host = address_for(bind_address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if not any(socket.inet_pton(family, host.partition("%")[0])):
        raise UsageError(
            f"{SETTING}={bind_address!r} means all interfaces: name an address that other ranks can connect to"
        )
    sock = closed_in_child(socket.socket(family, socket.SOCK_STREAM))
    try:
        sock.bind((host, 0))
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise not_listened_on(bind_address, error.strerror or str(error)) from None
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
