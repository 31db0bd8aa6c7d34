"""TLS 1.3 on the TCP connections of a job: whether a connection needs it, and how it begins.

Theory of operation. The handshake of Unisono comes first, in the clear: it has nothing secret, and OpenSSL reads
nothing from a stranger. Its HELLOs agree on TLS, and its proofs cover that agreement, so nobody between two ranks can
change it. Both ends then derive a secret from the key of the job and both HELLOs. They begin TLS, in which the dialer
is the client:

    dialer                                                     acceptor
       HELLO, with the features TLS and TLS_NEEDED       →
                                                         ←     HELLO with the feature TLS, proof
       proof, ClientHello of TLS                         →
                                                         ←     ServerHello … Finished
       Finished, confirmation                            →
                                                         ←     confirmation

Without certificates, the secret is the pre-shared key of TLS. The confirmations are encrypted. Each is an HMAC under
the secret of a value that TLS exports, and of the role of its sender. So they prove, also where certificates are used,
that the two ends of TLS are the two ranks which have proved that they hold the key of the job.

A certificate is named by the SHA-256 of its public key, in hex. So a certificate that was renewed for the same key has
the same name.

The native core goes on with the same TLS (transports/native/core/tcp/tls.h).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import importlib
import os
import select
import socket
import threading
from collections.abc import Sequence
from typing import Any

from unisono.errors import TransportUnavailableError
from unisono.foundation import log
from unisono.foundation.deadlines import Deadline
from unisono.foundation.forks import closed_in_child
from unisono.options import Options
from unisono.transports.links.handshake import TLS, TLS_NEEDED, HandshakeError

_log = log.get("links")

_CONFIRMATION_NBYTES = 32
_OFFERED = "offered"

# The networks whose interfaces need no TLS with tls="auto", as (first bytes of the address, bits that count): loopback,
# RFC 1918, RFC 3927, RFC 4193 and RFC 4291. The module ipaddress could tell too, but takes a millisecond to load.
_PRIVATE = {
    socket.AF_INET: (("127.0.0.0", 8), ("10.0.0.0", 8), ("172.16.0.0", 12), ("192.168.0.0", 16), ("169.254.0.0", 16)),
    socket.AF_INET6: (("::1", 128), ("fc00::", 7), ("fe80::", 10)),
}
_MAPPED = bytes(10) + b"\xff\xff"  # an address of IPv4 in one of IPv6


class TlsPolicy:
    """Which connections of a process use TLS, and with which certificates. With "on", it loads OpenSSL at once.

    Args:
        mode: "on", "off" or "auto", as the option `tls`.
        certificate, key, authority: paths of PEM files, or empty texts for the key of the job.
        certificates: the names of the certificates of the ranks, in their order; by default a rank may have any
            certificate of the authority.

    Raises:
        TransportUnavailableError: OpenSSL or a certificate cannot be used.
    """

    def __init__(
        self,
        mode: str = "off",
        certificate: str = "",
        key: str = "",
        authority: str = "",
        certificates: Sequence[str] = (),
    ) -> None:
        self._mode = mode
        self._files = (certificate, key, authority)
        self._certificates = certificates
        self._lock = threading.Lock()
        self._context: Any = None
        if mode == "on":
            self.context()

    @classmethod
    def of(cls, options: Options, certificates: Sequence[str] = ()) -> TlsPolicy:
        """Return the policy for the connections between ranks, which have these certificates."""
        return cls(options.tls, options.tls_certificate, options.tls_key, options.tls_authority, certificates)

    @classmethod
    def offering(cls) -> TlsPolicy:
        """Return the policy of a server that lets each client choose."""
        return cls(_OFFERED)

    @property
    def certificate(self) -> str:
        """The name of the certificate that this process presents on all connections; empty if there is none.

        With "auto", connections in a private network present none.
        """
        return _name_of(self.context().public_key()) if self._mode == "on" and self._files[0] else ""

    def check(self, rank: int, certificate: str) -> None:
        """Raise HandshakeError if a rank presents another certificate than its own."""
        if self.certificate and rank < len(self._certificates) and self._certificates[rank] != certificate:
            raise HandshakeError(f"TLS failed: rank {rank} presents another certificate than it has")

    def features(self, sock: socket.socket) -> int:
        """Return the features `TLS` and `TLS_NEEDED` of the HELLO for a connected socket.

        Raises:
            TransportUnavailableError: the connection needs TLS, but OpenSSL or a certificate cannot be used.
            ConnectionResetError: the peer has reset the connection.
        """
        if self._mode == "off" or sock.family == socket.AF_UNIX:
            return 0
        if self._mode == "on" or _is_exposed(sock):
            self.context()
            return TLS if self._mode == _OFFERED else TLS | TLS_NEEDED
        return TLS

    def context(self) -> Any:
        """Return the context of TLS; the first call loads OpenSSL.

        Raises:
            TransportUnavailableError: OpenSSL or a certificate cannot be used.
        """
        with self._lock:
            if self._context is None:
                self._context = _context(*self._files)
            return self._context


class TlsHandshake:
    """The handshake of TLS on a socket, and the confirmations. It never blocks.

    Args:
        policy: the policy of this process.
        sock: the connected socket, which stays the caller's until `take_socket`.
        secret: the secret of the connection, of 32 bytes.
        is_client: whether this end has dialled.

    Attributes:
        certificate: the name of the other end's certificate, once the handshake is complete; empty if it has none.

    Raises:
        HandshakeError: TLS cannot be used here.
        OSError: the connection has ended.
    """

    def __init__(self, policy: TlsPolicy, sock: socket.socket, secret: bytes, *, is_client: bool) -> None:
        from unisono.transports import _core

        # Otherwise each of its messages waits until the other kernel acknowledges the one before, which takes 40 ms.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._secret = secret
        self._is_client = is_client
        self._error = _core.TlsError
        self._is_encrypted = False
        self._received = b""
        self.certificate = ""
        try:
            self._tls = _core.Tls(policy.context(), sock.fileno(), is_client, secret)
        except (TransportUnavailableError, _core.TlsError) as error:
            raise HandshakeError(str(error)) from None

    def advance(self) -> bool:
        """Advance as far as is possible now; return whether the handshake is complete.

        Raises:
            HandshakeError: the other end is not the rank that it must be, or refuses this one.
            ConnectionResetError: the peer has reset the connection.
        """
        try:
            return self._advance()
        except self._error as error:
            raise HandshakeError(f"TLS failed: {error}") from None

    def take_socket(self) -> TlsSocket:
        """Return the encrypted socket, which takes over the plain one's descriptor. Call it after the handshake."""
        _log.debug("a connection %s another process is encrypted by TLS", "to" if self._is_client else "from")
        return closed_in_child(TlsSocket(self._sock, self._tls, self.certificate))

    def _advance(self) -> bool:
        if not self._is_encrypted:
            if not self._tls.handshake():
                return False
            self._is_encrypted = True
            if self._is_client:
                self._send_confirmation()
        while len(self._received) < _CONFIRMATION_NBYTES:
            data = self._tls.receive(_CONFIRMATION_NBYTES - len(self._received))
            if data is None:
                return False
            if not data:
                raise ConnectionResetError("it closed the connection during the handshake of TLS")
            self._received += data
        if not hmac.compare_digest(self._received, self._confirmation(of_client=not self._is_client)):
            raise HandshakeError("the other end of TLS is not the rank that holds the key of this job")
        self.certificate = _name_of(self._tls.public_key_of_peer())
        if not self._is_client:
            self._send_confirmation()
        return True

    def _send_confirmation(self) -> None:
        confirmation = self._confirmation(of_client=self._is_client)
        # A new connection has room for these few bytes.
        if self._tls.send(confirmation) != len(confirmation) or not self._tls.flush():
            raise ConnectionAbortedError(errno.ECONNABORTED, "the connection takes no bytes")

    def _confirmation(self, *, of_client: bool) -> bytes:
        role = b"client" if of_client else b"server"
        return hmac.digest(self._secret, role + self._tls.exported(), "sha256")


class TlsSocket(socket.socket):
    """A socket whose bytes TLS encrypts. It has the methods of a socket that Unisono uses, and the flag MSG_DONTWAIT.

    The descriptor never blocks. The timeout is that of the methods here. If `recv` returns fewer bytes than the caller
    asked for, the socket can be read when more arrive.

    Attributes:
        certificate: the name of the other end's certificate; empty if it has none.
    """

    def __init__(self, sock: socket.socket, tls: Any, certificate: str = "") -> None:
        timeout_s = sock.gettimeout()
        super().__init__(sock.family, sock.type, sock.proto, sock.detach())
        super().setblocking(False)
        self._tls = tls
        self._timeout_s = timeout_s
        self.certificate = certificate

    def settimeout(self, value: float | None) -> None:
        self._timeout_s = value

    def gettimeout(self) -> float | None:
        return self._timeout_s

    def setblocking(self, flag: bool) -> None:
        self._timeout_s = None if flag else 0.0

    def getblocking(self) -> bool:
        return self._timeout_s != 0.0

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        deadline = self._deadline()
        while (data := self._tls.receive(bufsize)) is None:
            self._wait(select.POLLIN, deadline, flags)
        received: bytes = data
        return received

    def send(self, data: Any, flags: int = 0) -> int:
        """Take up to all of `data`. Encrypted bytes may wait until the next call: see `is_flushed`."""
        deadline, data = self._deadline(), bytes(data)
        while not (sent := self._tls.send(data)) and data:
            self._wait(select.POLLOUT, deadline, flags)
        return int(sent)

    def sendall(self, data: Any, flags: int = 0) -> None:
        deadline, rest = self._deadline(), bytes(data)
        while rest or not self._tls.flush():
            sent = self._tls.send(rest)
            rest = rest[sent:]
            if not sent:
                self._wait(select.POLLOUT, deadline, flags)

    def is_flushed(self) -> bool:
        """Return whether the kernel has taken all encrypted bytes, after another attempt."""
        return bool(self._tls.flush())

    def connection(self) -> Any:
        """Return the connection for the native core, which takes over the socket and the state of TLS."""
        from unisono.transports import _core

        tls, self._tls = self._tls, None
        return _core.Connection(self.detach(), tls)

    def _deadline(self) -> Deadline | None:
        return Deadline(self._timeout_s) if self._timeout_s else None

    def _wait(self, event: int, deadline: Deadline | None, flags: int) -> None:
        if flags & socket.MSG_DONTWAIT or self._timeout_s == 0.0:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        poll = select.poll()
        poll.register(self, event)
        poll.poll(None if deadline is None else 1e3 * deadline.checked_remaining_s())


def connection_of(sock: socket.socket) -> Any:
    """Return the connection for the native core, which takes over the socket and its TLS if it has any."""
    from unisono.transports import _core

    return sock.connection() if isinstance(sock, TlsSocket) else _core.Connection(sock.detach())


def certificate_of(sock: socket.socket) -> str:
    """Return the name of the certificate that the other end of a connection has presented; empty if it has none."""
    return sock.certificate if isinstance(sock, TlsSocket) else ""


def is_flushed(sock: socket.socket) -> bool:
    """Return whether the kernel has taken all bytes that were sent."""
    return not isinstance(sock, TlsSocket) or sock.is_flushed()


def _name_of(public_key: bytes) -> str:
    return hashlib.sha256(public_key).hexdigest() if public_key else ""


def _context(certificate: str, key: str, authority: str) -> Any:
    from unisono.transports import _core

    try:
        return _core.TlsContext(certificate, key, authority)
    except _core.TlsError:
        # Environments such as Conda's have an OpenSSL that only their interpreter finds.
        with contextlib.suppress(ImportError):
            importlib.import_module("_ssl")
    try:
        return _core.TlsContext(certificate, key, authority)
    except _core.TlsError as error:
        raise TransportUnavailableError(f"TLS cannot be used: {error}") from None


def _is_exposed(sock: socket.socket) -> bool:
    """Return whether a connection leaves loopback and private networks, as far as its two addresses show.

    Raises:
        ConnectionResetError: the peer has reset the connection, which has no second address any more.
    """
    try:
        ends = sock.getsockname(), sock.getpeername()
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)) from None
    return not all(_is_private(str(end[0])) for end in ends)


def _is_private(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    number = socket.inet_pton(family, address.partition("%")[0])
    if number.startswith(_MAPPED):
        family, number = socket.AF_INET, number[len(_MAPPED) :]
    return any(_bits(number, bits) == _bits(socket.inet_pton(family, net), bits) for net, bits in _PRIVATE[family])


def _bits(number: bytes, bits: int) -> int:
    return int.from_bytes(number, "big") >> (8 * len(number) - bits)
