"""The store at ``tcp://host:port``: a server with one thread, and clients with one connection each.

A request is a header of fixed size, the key and the value. A reply is a status and a value. A client sends its next
request after the reply to the last one. With a job key every client starts with the authenticated handshake. Without a
key the server listens on loopback only, where any process of this machine may use it. docs/security.md states that
trust. With a key, the client decides whether TLS encrypts the connection. It is then the key that authenticates both,
also if ranks have certificates.
"""

from __future__ import annotations

import enum
import errno
import socket
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from unisono.errors import RendezvousError, UsageError
from unisono.foundation import log
from unisono.foundation.deadlines import LONGEST_WAIT_S, Deadline
from unisono.foundation.forks import closed_in_child
from unisono.foundation.wire import exactly
from unisono.transports.host.bind_address import lookup
from unisono.transports.host.system_limits import unavailable
from unisono.transports.links.event_loop import EventLoop, Timer
from unisono.transports.links.handshake import NO_RANK, Admission, DialerHandshake, HandshakeError, Hello, Purpose
from unisono.transports.links.handshake_io import BACKLOG, HandshakeAcceptor, HandshakeServer, greet, prepare
from unisono.transports.rendezvous.stores import (
    KEY_LIMIT_NBYTES,
    VALUE_LIMIT_NBYTES,
    already_set,
    check_value,
    encoded_key,
    not_set,
)
from unisono.transports.tcp.tls import TlsPolicy, is_flushed

KEYS_LIMIT = 65_536

_PENDING_LIMIT = 1024
_LINGER_PAUSE_S = 0.005
_CHUNK_NBYTES = 1 << 16
_REQUEST = struct.Struct("!BHII")  # verb, bytes of the key, bytes of the value, timeout in milliseconds
_REPLY = struct.Struct("!BI")  # status, bytes of the value
_GRACE_S = 5.0
_RETRY_S = (0.002, 0.1)

_log = log.get("rendezvous")


class _Verb(enum.IntEnum):
    SET = 1
    GET = 2


class _Status(enum.IntEnum):
    OK = 0
    NOT_SET = 1
    ALREADY_SET = 2
    FAILED = 3
    OTHER_RENDEZVOUS = 4


class _Client:
    """A client as the server sees it: `waiting_for` is the key of its pending GET, which ends with `timer`."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = bytearray()
        self.unsent = bytearray()
        self.waiting_for: bytes | None = None
        self.timer: Timer | None = None


class _ProtocolError(Exception):
    """A client broke the protocol of the store."""


def _request_in(received: bytearray) -> tuple[_Verb, bytes, bytes, int] | None:
    """Return the verb, the key, the value and the timeout in ms of a request; None if bytes of it are missing.

    Raises:
        _ProtocolError: the bytes are no request, or more than one.
    """
    if len(received) < _REQUEST.size:
        return None
    verb, key_nbytes, value_nbytes, timeout_ms = _REQUEST.unpack_from(received)
    if verb not in tuple(_Verb) or not 0 < key_nbytes <= KEY_LIMIT_NBYTES or value_nbytes > VALUE_LIMIT_NBYTES:
        raise _ProtocolError("its request is malformed or too long")
    end_of_key = _REQUEST.size + key_nbytes
    total = end_of_key + value_nbytes
    if len(received) > total:
        raise _ProtocolError("its request is longer than its header says")
    if len(received) < total:
        return None
    return _Verb(verb), bytes(received[_REQUEST.size : end_of_key]), bytes(received[end_of_key:]), timeout_ms


class StoreServer:
    """Serves a store at `host`:`port` in a thread of its own, from construction to `close`.

    Args:
        host: name or address to listen on. With a key it may be empty, for all interfaces.
        port: port to listen on, or 0 for any free port, which `url` shows.
        key: the job's key, 32 bytes, or None to serve any process on loopback.
        job: the job's id, 16 bytes.
        prefix: the prefix of all keys that are served. A client that asks for other keys belongs to a later rendezvous
            at the same address. The server refuses it, and it tries again.

    Raises:
        RendezvousError: the port is in use, or the server cannot listen on the address.
        UsageError: `key` is None and `host` is not loopback.
    """

    def __init__(self, host: str, port: int, *, key: bytes | None, job: bytes, prefix: str = "") -> None:
        self._listening = _listen(host, port, open_to_all=key is None)
        self.url = _url(*self._listening.getsockname()[:2])
        self._prefix = prefix.encode()
        self._values: dict[bytes, bytes] = {}
        self._clients: set[_Client] = set()
        self._served = 0
        self._failure: str | None = None
        self._handshakes: HandshakeServer | None = None
        self._closing = threading.Lock()
        self._closed = False
        try:
            self._loop = EventLoop("unisono-store", self._break_down)
            if key is None:
                HandshakeAcceptor(self._loop, self._listening, self._accept)
            else:
                admission = Admission(job, 0, NO_RANK, frozenset({NO_RANK}), frozenset({Purpose.STORE}))
                tls = TlsPolicy.offering()
                self._handshakes = HandshakeServer(self._loop, key, admission, _PENDING_LIMIT, self._admit, tls)
                self._handshakes.watch(self._listening)
            self._loop.start()
        except BaseException:
            self._listening.close()
            raise

    def fail(self, reason: str) -> None:
        """Make every pending and later `get` of every client raise `RendezvousError` with the first `reason`."""
        with self._closing:
            if not self._closed:
                self._loop.submit(partial(self._fail, reason))

    def take(self, sock: socket.socket) -> None:
        """Serve a nonblocking connection that another process has made, and close it once this server is closed."""
        with self._closing:
            if not self._closed and self._handshakes is not None:
                self._loop.submit(partial(self._handshakes.take, sock))
                return
        sock.close()

    def close(self, *, linger_s: float = 0.0, clients: int = 0) -> None:
        """Stop serving; clients that still wait get `RendezvousError`. May be called twice.

        Args:
            linger_s: the longest time, in seconds, to wait until all clients have left, so that they can read the last
                values.
            clients: the number of clients that will connect in all. Some may not have connected yet.
        """
        with self._closing:
            if self._closed:
                return
            deadline = Deadline(linger_s)
            while (self._clients or self._served < clients) and not deadline.has_passed():
                time.sleep(_LINGER_PAUSE_S)
            self._closed = True
            self._loop.close(self._finish)
            self._listening.close()

    def _finish(self) -> None:
        if self._handshakes:
            self._handshakes.close()
        for client in list(self._clients):
            self._drop(client)

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        for client in list(self._clients):
            if client.waiting_for is not None:
                self._reply(client, _Status.FAILED, self._failure.encode())

    def _break_down(self, error: Exception) -> None:
        self._listening.close()
        self._fail(unavailable(f"the store at {self.url} has ended", error).message)
        self._finish()

    def _accept(self, sock: socket.socket) -> None:
        prepare(sock)
        self._serve(sock)

    def _admit(self, _: Hello, sock: socket.socket) -> None:
        self._serve(sock)

    def _serve(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        client = _Client(sock)
        self._served += 1
        self._clients.add(client)
        self._loop.watch(sock, partial(self._move, client))

    def _drop(self, client: _Client) -> None:
        if client in self._clients:
            self._clients.remove(client)
            self._stop_waiting(client)
            self._loop.unwatch(client.sock)
            client.sock.close()

    def _move(self, client: _Client) -> None:
        """Send replies and read requests, as far as the socket allows now."""
        try:
            self._flush(client)
            while client in self._clients:
                data = client.sock.recv(_CHUNK_NBYTES)
                if not data:
                    raise _ProtocolError("it closed the connection")
                client.received += data
                self._take_request(client)
        except BlockingIOError:
            pass
        except (OSError, _ProtocolError) as error:
            _log.debug("dropped a client of the store: %s", error)
            self._drop(client)

    def _take_request(self, client: _Client) -> None:
        if client.waiting_for is not None or client.unsent:
            raise _ProtocolError("it sent a request before it had the reply to the last one")
        request = _request_in(client.received)
        if request is None:
            return
        verb, key, value, timeout_ms = request
        client.received.clear()
        if not key.startswith(self._prefix):
            self._reply(client, _Status.OTHER_RENDEZVOUS, b"")
        elif verb == _Verb.SET:
            self._set(client, key, value)
        else:
            self._get(client, key, timeout_ms)

    def _set(self, client: _Client, key: bytes, value: bytes) -> None:
        if key in self._values:
            self._reply(client, _Status.ALREADY_SET, b"")
        elif len(self._values) >= KEYS_LIMIT:
            self._reply(client, _Status.FAILED, b"the store is full")
        else:
            self._values[key] = value
            self._reply(client, _Status.OK, b"")
            for waiter in [client for client in self._clients if client.waiting_for == key]:
                self._reply(waiter, _Status.OK, value)

    def _get(self, client: _Client, key: bytes, timeout_ms: int) -> None:
        if self._failure is not None:
            self._reply(client, _Status.FAILED, self._failure.encode())
        elif key in self._values:
            self._reply(client, _Status.OK, self._values[key])
        elif timeout_ms == 0:
            self._reply(client, _Status.NOT_SET, b"")
        else:
            client.waiting_for = key
            client.timer = self._loop.call_after(timeout_ms / 1000, partial(self._reply, client, _Status.NOT_SET, b""))

    def _stop_waiting(self, client: _Client) -> None:
        client.waiting_for = None
        if client.timer is not None:
            self._loop.cancel(client.timer)
            client.timer = None

    def _reply(self, client: _Client, status: _Status, value: bytes) -> None:
        self._stop_waiting(client)
        client.unsent += _REPLY.pack(status, len(value)) + value
        try:
            self._flush(client)
        except OSError as error:
            _log.debug("dropped a client of the store: %s", error)
            self._drop(client)

    def _flush(self, client: _Client) -> None:
        if not client.unsent and is_flushed(client.sock):
            return
        try:
            sent = client.sock.send(client.unsent)
        except BlockingIOError:
            sent = 0
        del client.unsent[:sent]
        is_writing = bool(client.unsent) or not is_flushed(client.sock)
        self._loop.watch(client.sock, partial(self._move, client), writable=is_writing)


class TcpStore:
    """A `Store` that is a client of a `StoreServer`. Its threads make requests one at a time.

    Args:
        host: the host of the server, which may start later than the client.
        port: the port of the server.
        key: the job's key, or None if the server has none.
        job: the job's id, 16 bytes.
        timeout_s: seconds to wait for the server to start. During this time the client also tolerates slow replies,
            because a machine may start many more ranks than it has cores.
        prefix: the prefix of all keys that the client uses. If the server still serves another rendezvous, the client
            waits for its end.
        is_served: whether the server has certainly started. Then a refused connection is an error at once.
        tls: whether the connection uses TLS; by default it does not.
        connect: (seconds) → a connection to the server, or None to dial it. By default the client dials it.

    Raises:
        RendezvousError: no server answers, or it belongs to another job.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        key: bytes | None,
        job: bytes,
        timeout_s: float,
        prefix: str = "",
        is_served: bool = False,
        tls: TlsPolicy | None = None,
        connect: Callable[[float], socket.socket | None] = lambda _: None,
    ) -> None:
        self._address = host, port
        self._connect = connect
        self._tls = tls or TlsPolicy()
        self._url = _url(host, port)
        self._key = key
        self._job = job
        self._prefix = prefix
        self._is_served = is_served
        self._timeout_s = timeout_s
        self._requesting = threading.Lock()
        self._deadline = Deadline(timeout_s)
        self._sock = self._opened()

    def set(self, key: str, value: bytes) -> None:
        check_value(value)
        status, message = self._ask(_Verb.SET, encoded_key(key), value, 0)
        if status == _Status.ALREADY_SET:
            raise already_set(key)
        self._check(status, message)

    def get(self, key: str, timeout_s: float) -> bytes:
        timeout_ms = round(min(timeout_s, LONGEST_WAIT_S) * 1000)
        status, value = self._ask(_Verb.GET, encoded_key(key), b"", timeout_ms)
        if status == _Status.NOT_SET:
            raise not_set(key, timeout_s)
        self._check(status, value)
        return value

    def clear(self) -> None:
        """Do nothing: the store ends with the rendezvous, or holds no key of the job."""

    def close(self) -> None:
        self._sock.close()

    def _opened(self) -> socket.socket:
        """Return a new connection to the server, which may start, and may be slow, until the deadline."""
        while True:
            try:
                sock = self._connect(self._deadline.remaining_s()) or _connect(
                    *self._address, self._deadline, self._key is None, self._is_served
                )
            except OSError as error:
                raise _unreachable(self._url, self._timeout_s, error) from None
            try:
                sock = self._greeted(sock)
                self._check_rendezvous(sock)
                return sock
            except HandshakeError as error:
                sock.close()
                raise RendezvousError(f"the store at {self._url} refuses this process: {error.message}") from error
            except OSError as error:
                sock.close()
                # The server drops a client whose handshake takes too long, such as a rank that waits for its core.
                if not isinstance(error, ConnectionError) or self._deadline.has_passed():
                    raise RendezvousError(
                        f"the store at {self._url} does not answer as one of this job ({error}): check that all "
                        "processes have its address, its key and the same setting of TLS"
                    ) from error
            time.sleep(_RETRY_S[1])

    def _greeted(self, sock: socket.socket) -> socket.socket:
        """Run the handshake; return the socket to use, which has taken over `sock` if it is another one."""
        if self._key is None:
            prepare(sock)
            return sock
        hello = Hello(self._job, 0, NO_RANK, NO_RANK, Purpose.STORE, features=self._tls.features(sock))
        return greet(sock, DialerHandshake(self._key, hello), self._deadline, self._tls)

    def _check_rendezvous(self, sock: socket.socket) -> None:
        """Raise ConnectionError if the server still serves an earlier rendezvous."""
        if self._prefix:
            sock.settimeout(self._deadline.checked_remaining_s())
            if _request(sock, _Verb.GET, f"{self._prefix}?".encode(), b"", 0)[0] == _Status.OTHER_RENDEZVOUS:
                raise ConnectionResetError("it still serves an earlier rendezvous of the ranks")

    def _check(self, status: int, message: bytes) -> None:
        if status != _Status.OK:
            raise RendezvousError(message.decode(errors="replace"))

    def _ask(self, verb: _Verb, key: bytes, value: bytes, timeout_ms: int) -> tuple[int, bytes]:
        with self._requesting:
            try:
                patience_s = max(_GRACE_S, self._deadline.remaining_s())
                self._sock.settimeout(min(timeout_ms / 1000 + patience_s, LONGEST_WAIT_S))
                return _request(self._sock, verb, key, value, timeout_ms)
            except OSError as error:
                # A late reply must not be taken for the reply to the next request.
                self._sock.close()
                raise RendezvousError(f"the store at {self._url} is gone: {error}") from error
            except BaseException:
                self._sock.close()
                raise


def _request(sock: socket.socket, verb: _Verb, key: bytes, value: bytes, timeout_ms: int) -> tuple[int, bytes]:
    """Return the status and the value of the server's reply; raises OSError if there is none, or it is malformed."""
    sock.sendall(_REQUEST.pack(verb, len(key), len(value), timeout_ms) + key + value)
    status, nbytes = _REPLY.unpack(exactly(sock, _REPLY.size))
    if nbytes > VALUE_LIMIT_NBYTES:
        raise OSError("its reply is too long")
    return status, exactly(sock, nbytes)


def _unreachable(url: str, timeout_s: float, error: OSError) -> RendezvousError:
    """Return the error for a store that refuses connections or cannot be reached."""
    if isinstance(error, ConnectionError | TimeoutError):
        return RendezvousError(f"no store answers at {url} within {timeout_s:g} s: {error}")
    hint = " (is the loopback interface up?)" if error.errno == errno.ENETUNREACH and "127." in url else ""
    return RendezvousError(f"the store at {url} cannot be reached: {error.strerror or error}{hint}")


def _connect(host: str, port: int, deadline: Deadline, is_open: bool, is_served: bool) -> socket.socket:
    """Connect to a server; unless it `is_served` already, try again until `deadline` while nobody listens.

    Raises:
        UsageError: the store has no key (`is_open`), and is not on loopback.
        OSError: the connection cannot be made.
    """
    pause, longest = _RETRY_S
    while True:
        addresses = _addresses(host, port, open_to_all=is_open)
        try:
            return _connected(addresses, deadline)
        except ConnectionError as error:
            # The server of an earlier rendezvous resets connections that it has not accepted when it ends.
            is_refused = isinstance(error, ConnectionRefusedError)
            if (is_served and is_refused) or deadline.remaining_s() <= pause:
                raise
        time.sleep(pause)
        pause = min(2 * pause, longest)


def _connected(addresses: list[Any], deadline: Deadline) -> socket.socket:
    """Return a socket connected to the first of these addresses that answers; raises the last error if none does."""
    error: OSError | None = None
    for family, kind, protocol, _, address in addresses:
        sock = closed_in_child(socket.socket(family, kind, protocol))
        try:
            sock.settimeout(deadline.checked_remaining_s())
            sock.connect(address)
            if sock.getsockname()[:2] != address[:2]:
                return sock
            # Nobody listens yet, and the kernel chose that very port for the client: it is connected to itself.
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        except OSError as failed:
            sock.close()
            error = failed
    raise error or OSError("the host has no address")


def _addresses(host: str, port: int, *, open_to_all: bool) -> list[Any]:
    """Return the addresses of a host, from `socket.getaddrinfo`; of a store that is open to all, only loopback.

    Raises:
        UsageError: the store is open to all, and the host has no loopback address.
    """
    addresses = socket.getaddrinfo(lookup(host), port, type=socket.SOCK_STREAM)
    if open_to_all:
        addresses = [entry for entry in addresses if _is_loopback(str(entry[4][0]))]
        if not addresses:
            raise UsageError(f"a store on {host} would be open to anyone: give the job a key (UNISONO_KEY_FILE)")
    return addresses


def _is_loopback(address: str) -> bool:
    # The module ipaddress could tell too, but takes a millisecond to load.
    return address.startswith(("127.", "::ffff:127.")) or address == "::1"


def _listen(host: str, port: int, *, open_to_all: bool) -> socket.socket:
    try:
        if not host:
            return _listen_everywhere(port)
        family, kind, protocol, _, address = _addresses(host, port, open_to_all=open_to_all)[0]
        sock = closed_in_child(socket.socket(family, kind, protocol))
    except OSError as error:
        raise RendezvousError(f"the store cannot listen on {_url(host, port)}: {error.strerror or error}") from None
    try:
        # So a new store can use the port of a store that has just ended.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise RendezvousError(
            f"the store cannot listen on {_url(host, port)}: {error.strerror or error}; "
            "start the job with a store at another port"
        ) from None
    return sock


def _listen_everywhere(port: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    sock = socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    sock.setblocking(False)
    return closed_in_child(sock)


def _url(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
