"""The store behind ``tcp://host:port``: one server thread, and a client with one connection.

A request is a header of fixed size, the key and the value; a reply is a status and a value. A client sends its next
request after the reply to the last one. With a job key every client says the authenticated hello first. Without one the
server listens on loopback only, where any process of this machine may use it: that trust is stated in docs/security.md.
"""

from __future__ import annotations

import enum
import socket
import struct
import threading
import time
from functools import partial
from typing import Any

from unisono import log
from unisono.errors import RendezvousError, UsageError
from unisono.forks import closed_in_child
from unisono.transports.doorkeeper import BACKLOG, Doorkeeper, accept, greet, prepare, remaining
from unisono.transports.event_loop import EventLoop
from unisono.transports.hello import NO_RANK, DialerHandshake, Endpoint, HandshakeError, Hello, Purpose
from unisono.transports.interfaces import lookup
from unisono.transports.rendezvous.stores import (
    KEY_LIMIT_NBYTES,
    VALUE_LIMIT_NBYTES,
    already_set,
    check_value,
    encoded_key,
    not_set,
)

KEYS_LIMIT = 65_536

_PENDING_LIMIT = 1024
_LINGER_PAUSE_S = 0.005
_CHUNK_NBYTES = 1 << 16
_REQUEST = struct.Struct("!BHII")  # verb, bytes of the key, bytes of the value, timeout in milliseconds
_REPLY = struct.Struct("!BI")  # status, bytes of the value
_LONGEST_TIMEOUT_MS = 0xFFFF_FFFF
_GRACE_S = 5.0
_RETRY_S = (0.002, 0.1)

_log = log.get(__name__)


class _Verb(enum.IntEnum):
    SET = 1
    GET = 2


class _Status(enum.IntEnum):
    OK = 0
    NOT_SET = 1
    ALREADY_SET = 2
    FAILED = 3


class _Client:
    """A connection of the server; `waiting_for` is the key of its unanswered GET, `ticket` counts its requests."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = bytearray()
        self.unsent = bytearray()
        self.waiting_for: bytes | None = None
        self.ticket = 0


class _ProtocolError(Exception):
    """A client does not speak the protocol of the store."""


class StoreServer:
    """Serves a store on `host`:`port` (0: a free one), from construction to `close`, in a thread of its own.

    Args:
        host: name or address to listen on.
        port: port to listen on, or 0 for any that is free; `url` tells which.
        key: the job's key, 32 bytes, or None to serve everyone on loopback.
        job: the job's id, 16 bytes.

    Raises:
        RendezvousError: the port is in use, or the address cannot be listened on.
        UsageError: `key` is None and `host` is not loopback.
    """

    def __init__(self, host: str, port: int, *, key: bytes | None, job: bytes) -> None:
        self._listening = _listen(host, port, open_to_all=key is None)
        self.url = _url(*self._listening.getsockname()[:2])
        self._values: dict[bytes, bytes] = {}
        self._clients: set[_Client] = set()
        self._failure: str | None = None
        self._doorkeeper: Doorkeeper | None = None
        self._loop = EventLoop("unisono-store")
        if key is None:
            self._loop.watch(self._listening, self._accept)
        else:
            endpoint = Endpoint(job, 0, NO_RANK, frozenset({NO_RANK}), frozenset({Purpose.STORE}))
            self._doorkeeper = Doorkeeper(self._loop, key, endpoint, _PENDING_LIMIT, self._admit)
            self._doorkeeper.watch(self._listening)
        self._closing = threading.Lock()
        self._closed = False
        self._loop.start()

    def fail(self, reason: str) -> None:
        """Make every pending and later `get` of every client raise `RendezvousError` with the first `reason`."""
        with self._closing:
            if not self._closed:
                self._loop.submit(partial(self._fail, reason))

    def close(self, *, linger_s: float = 0.0) -> None:
        """Stop serving; clients that still wait get `RendezvousError`. May be called twice.

        Args:
            linger_s: seconds to go on until all clients have left by themselves, so that they can read the last values.
        """
        with self._closing:
            if self._closed:
                return
            until = time.monotonic() + linger_s
            while self._clients and time.monotonic() < until:
                time.sleep(_LINGER_PAUSE_S)
            self._closed = True
            self._loop.close(self._finish)
            self._listening.close()

    def _finish(self) -> None:
        if self._doorkeeper:
            self._doorkeeper.close()
        for client in list(self._clients):
            self._drop(client)

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        for client in list(self._clients):
            if client.waiting_for is not None:
                self._reply(client, _Status.FAILED, self._failure.encode())

    def _accept(self) -> None:
        sock = accept(self._listening, lambda: False)
        if sock is not None:
            prepare(sock)
            self._serve(sock)

    def _admit(self, _: Hello, sock: socket.socket) -> None:
        self._serve(sock)

    def _serve(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        client = _Client(sock)
        self._clients.add(client)
        self._loop.watch(sock, partial(self._move, client))

    def _drop(self, client: _Client) -> None:
        if client in self._clients:
            self._clients.remove(client)
            self._loop.unwatch(client.sock)
            client.sock.close()

    def _move(self, client: _Client) -> None:
        """Read what there is to read, and write what can be written."""
        try:
            self._flush(client)
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
        if len(client.received) < _REQUEST.size:
            return
        verb, key_nbytes, value_nbytes, timeout_ms = _REQUEST.unpack_from(client.received)
        if verb not in tuple(_Verb) or not 0 < key_nbytes <= KEY_LIMIT_NBYTES or value_nbytes > VALUE_LIMIT_NBYTES:
            raise _ProtocolError("its request is malformed or too long")
        total = _REQUEST.size + key_nbytes + value_nbytes
        if len(client.received) > total:
            raise _ProtocolError("its request is longer than its header says")
        if len(client.received) < total:
            return
        key = bytes(client.received[_REQUEST.size : _REQUEST.size + key_nbytes])
        value = bytes(client.received[_REQUEST.size + key_nbytes :])
        client.received.clear()
        client.ticket += 1
        if verb == _Verb.SET:
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
            for waiter in [one for one in self._clients if one.waiting_for == key]:
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
            self._loop.call_at(time.monotonic() + timeout_ms / 1000, partial(self._expire, client, client.ticket))

    def _expire(self, client: _Client, ticket: int) -> None:
        if client in self._clients and client.waiting_for is not None and client.ticket == ticket:
            self._reply(client, _Status.NOT_SET, b"")

    def _reply(self, client: _Client, status: _Status, value: bytes) -> None:
        client.waiting_for = None
        client.unsent += _REPLY.pack(status, len(value)) + value
        try:
            self._flush(client)
        except OSError as error:
            _log.debug("dropped a client of the store: %s", error)
            self._drop(client)

    def _flush(self, client: _Client) -> None:
        if not client.unsent:
            return
        try:
            sent = client.sock.send(client.unsent)
        except BlockingIOError:
            sent = 0
        del client.unsent[:sent]
        self._loop.watch(client.sock, partial(self._move, client), writable=bool(client.unsent))


class TcpStore:
    """A client of a `StoreServer`; `Store` says what its methods do. Threads take turns.

    Args:
        host: where the server listens; it may start later than the client.
        port: its port.
        key: the job's key, or None if the server has none.
        job: the job's id, 16 bytes.
        timeout_s: seconds to wait for the server. For as long from now on it may be slow to answer, too: a machine may
            have many more ranks to start than cores.
        is_served: whether the server is known to have started, so that nobody who listens is a failure at once.

    Raises:
        RendezvousError: there is no server, or it is one of another job.
    """

    def __init__(
        self, host: str, port: int, *, key: bytes | None, job: bytes, timeout_s: float, is_served: bool = False
    ) -> None:
        self._url = _url(host, port)
        self._turn = threading.Lock()
        self._patient_until = deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._sock = _connect(host, port, deadline, is_served)
            except OSError as error:
                raise RendezvousError(f"no store answers at {self._url} within {timeout_s:g} s: {error}") from None
            try:
                self._greet(key, job, deadline)
            except HandshakeError as error:
                self._sock.close()
                raise RendezvousError(f"the store at {self._url} is not of this job: {error.message}") from error
            except OSError as error:
                self._sock.close()
                # It hangs up on those that take too long to say the hello, as a rank does that waits for its core.
                if not isinstance(error, ConnectionError) or time.monotonic() >= deadline:
                    raise RendezvousError(
                        f"the store at {self._url} does not answer as one of this job: {error}"
                    ) from error
            else:
                return
            time.sleep(_RETRY_S[1])

    def set(self, key: str, value: bytes) -> None:
        """See `Store.set`."""
        check_value(value)
        status, message = self._ask(_Verb.SET, encoded_key(key), value, 0)
        if status == _Status.ALREADY_SET:
            raise already_set(key)
        self._check(status, message)

    def get(self, key: str, timeout_s: float) -> bytes:
        """See `Store.get`."""
        timeout_ms = min(round(timeout_s * 1000), _LONGEST_TIMEOUT_MS)
        status, value = self._ask(_Verb.GET, encoded_key(key), b"", timeout_ms)
        if status == _Status.NOT_SET:
            raise not_set(key, timeout_s)
        self._check(status, value)
        return value

    def close(self) -> None:
        """See `Store.close`."""
        self._sock.close()

    def _greet(self, key: bytes | None, job: bytes, deadline: float) -> None:
        if key is None:
            prepare(self._sock)
            return
        greet(self._sock, DialerHandshake(key, Hello(job, 0, NO_RANK, NO_RANK, Purpose.STORE)), deadline)

    def _check(self, status: int, message: bytes) -> None:
        if status != _Status.OK:
            raise RendezvousError(message.decode(errors="replace"))

    def _ask(self, verb: _Verb, key: bytes, value: bytes, timeout_ms: int) -> tuple[int, bytes]:
        with self._turn:
            try:
                patience_s = max(_GRACE_S, self._patient_until - time.monotonic())
                self._sock.settimeout(timeout_ms / 1000 + patience_s)
                self._sock.sendall(_REQUEST.pack(verb, len(key), len(value), timeout_ms) + key + value)
                status, nbytes = _REPLY.unpack(self._receive(_REPLY.size))
                if nbytes > VALUE_LIMIT_NBYTES:
                    raise ConnectionError("its reply is too long")
                return status, self._receive(nbytes)
            except OSError as error:
                # A late reply must not be taken for the reply to the next request.
                self._sock.close()
                raise RendezvousError(f"the store at {self._url} is gone: {error}") from error
            except BaseException:
                self._sock.close()
                raise

    def _receive(self, nbytes: int) -> bytes:
        received = bytearray()
        while len(received) < nbytes:
            data = self._sock.recv(nbytes - len(received))
            if not data:
                raise ConnectionResetError("it closed the connection")
            received += data
        return bytes(received)


def _connect(host: str, port: int, deadline: float, is_served: bool) -> socket.socket:
    """Connect; where the server may not have started yet, try again until `deadline` while nobody listens."""
    pause, longest = _RETRY_S
    while True:
        try:
            address: Any = lookup(host), port
            sock = closed_in_child(socket.create_connection(address, remaining(deadline)))
            if sock.getsockname() != sock.getpeername():
                return sock
            # The kernel chose the very port that nobody listens on yet, and has connected the socket to itself.
            sock.close()
        except ConnectionRefusedError:
            if is_served or time.monotonic() + pause >= deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, longest)


def _is_loopback(address: object) -> bool:
    from ipaddress import ip_address

    return ip_address(str(address)).is_loopback


def _listen(host: str, port: int, *, open_to_all: bool) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(lookup(host), port, type=socket.SOCK_STREAM)[0]
        if open_to_all and not _is_loopback(address[0]):
            raise UsageError(f"a store on {host} would be open to anyone: give the job a key (UNISONO_KEY_FILE)")
        sock = closed_in_child(socket.socket(family, kind, protocol))
    except OSError as error:
        raise RendezvousError(f"the store cannot listen on {_url(host, port)}: {error.strerror or error}") from None
    try:
        # A port of a store that has just ended is free for the next one.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise RendezvousError(
            f"the store cannot listen on {_url(host, port)}: {error.strerror or error}; "
            "whoever starts the job must pick another port"
        ) from None
    return sock


def _url(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
