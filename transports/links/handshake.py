"""The handshake: two processes prove to each other that they hold the key of the job, before they read anything else.

    dialer                                                     acceptor
       HELLO                                             →
                                                         ←     HELLO, HMAC(key, "acceptor" ‖ both hellos)
       HMAC(key, "dialer" ‖ both hellos)                 →
                                                         ←     READY, or the beginning of TLS (tcp/tls.py)

Every message has a fixed size, so no length comes from a stranger. Each proof covers both HELLOs, with both nonces, and
the role of its sender. So a recorded proof is worthless in another connection, and a proof that is sent back to its
author has the wrong role. The layout of HELLO is the same in every wire version, so any two versions can say how they
disagree.

Nothing here touches a socket (the model is h11): `receive` takes received bytes and returns the bytes to send.

Open questions
--------------
Considered: TLS before this exchange. Strangers would then reach OpenSSL, whose messages have lengths of their choice.
So TLS begins after it, and two bits that both proofs cover agree on TLS (decision 18).

Doubted: there has been one wire version, so the choice among several has run in tests only. The layout of HELLO must
stay, so a new fact needs a feature bit or a later message. Without TLS, the proof holds for the moment of the
connection, and an attacker on the path can change everything that follows.

This would change our mind: a second wire version that cannot be expressed by feature bits, or a network between hosts
that is trusted by default and should not be.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import hmac
import os
import struct
from collections.abc import Callable, Container
from dataclasses import field

from unisono.errors import InternalError, TransportUnavailableError, UsageError
from unisono.foundation.records import record

WIRE_VERSIONS = (1, 1)
"""The first and the last wire version of this build."""

TLS = 1
"""The feature of a connection that can use TLS; in the answer to a HELLO, that it uses TLS from now on."""
TLS_NEEDED = 2
"""The feature of a connection that must use TLS; in the answer, that it must, but the dialer cannot."""

KEY_NBYTES = 32
JOB_NBYTES = 16
NO_RANK = 0xFFFF_FFFF
"""The rank of a process that has none: a store, or one of its clients."""

_MAGIC = b"UNIS"
_NONCE_NBYTES = 32
_LAYOUT = struct.Struct("!4sHHQ16sIIIHQI32s")
_PROOF_NBYTES = hashlib.sha256().digest_size
_READY = b"\x01"


class Purpose(enum.IntEnum):
    """The use of a connection, on the wire."""

    CONTROL = 0
    SHM = 1
    TCP = 2
    STORE = 3
    UCX = 4
    MPI = 5
    HOST = 6
    SURVIVOR = 7
    TCP_RESUME = 8
    TCP_REDIAL = 9
    JOIN = 10
    SWARM = 11
    PROBE = 12
    STREAM = 13


# A stream carries another connection, which has a handshake and TLS of its own.
_WITHOUT_TLS = frozenset({Purpose.STREAM})


class HandshakeError(TransportUnavailableError):
    """The handshake has failed; the connection must be closed.

    Attributes:
        reply: bytes to send before closing, so that an honest peer learns the reason; may be empty.
    """

    def __init__(self, message: str, reply: bytes = b"") -> None:
        super().__init__(message)
        self.reply = reply


@record
class Hello:
    """The HELLO message of one side.

    Attributes:
        job: the id of the job, 16 bytes; not secret.
        epoch: the generation of the job's membership.
        sender, receiver: ranks in the job, or `NO_RANK`.
        purpose: the use of the connection.
        communicator, lane: the communicator and the lane that it will carry; 0 where they have no meaning.
        versions: first and last wire version; equal once both sides have agreed.
        features: feature bits.
        nonce: 32 bytes, fresh for every hello.
    """

    job: bytes
    epoch: int
    sender: int
    receiver: int
    purpose: Purpose
    communicator: int = 0
    lane: int = 0
    versions: tuple[int, int] = WIRE_VERSIONS
    features: int = 0
    nonce: bytes = field(default_factory=lambda: os.urandom(_NONCE_NBYTES))

    def __post_init__(self) -> None:
        if (len(self.job), len(self.nonce)) != (JOB_NBYTES, _NONCE_NBYTES):
            raise UsageError(f"a job id has {JOB_NBYTES} bytes and a nonce {_NONCE_NBYTES}")

    def pack(self) -> bytes:
        """Return the message, of `HELLO_NBYTES` bytes."""
        ranks = (self.sender, self.receiver)
        carried = (self.purpose, self.communicator, self.lane)
        return _LAYOUT.pack(_MAGIC, *self.versions, self.features, self.job, self.epoch, *ranks, *carried, self.nonce)

    @classmethod
    def unpack(cls, message: bytes) -> Hello:
        """Return the hello in `message`, which has `HELLO_NBYTES` bytes.

        Raises:
            HandshakeError: the message is not a HELLO of Unisono.
        """
        magic, first, last, features, job, epoch, sender, receiver, purpose, communicator, lane, nonce = _LAYOUT.unpack(
            message
        )
        if magic != _MAGIC:
            raise HandshakeError("the other end sent no HELLO of Unisono, so it is another program")
        try:
            use = Purpose(purpose)
        except ValueError:
            raise HandshakeError(f"unknown purpose {purpose}") from None
        return cls(job, epoch, sender, receiver, use, communicator, lane, (first, last), features, nonce)


HELLO_NBYTES = _LAYOUT.size


@record
class Admission:
    """The identity of an acceptor, and the connections that it admits.

    Attributes:
        job, epoch, rank: those of the acceptor; a HELLO must be addressed to them.
        senders: the ranks that it admits.
        purposes: the purposes that it serves.
        versions, features: the wire versions and features that it offers.
    """

    job: bytes
    epoch: int
    rank: int
    senders: Container[int]
    purposes: Container[Purpose]
    versions: tuple[int, int] = WIRE_VERSIONS
    features: int = 0

    def serving(self, purpose: Purpose) -> Admission:
        """Return the admission of connections with this purpose, of which some never use TLS."""
        return dataclasses.replace(self, features=0) if purpose in _WITHOUT_TLS else self

    def objection(self, hello: Hello) -> str | None:
        """Return the reason to refuse a connection with this HELLO, as text; None to accept it."""
        checks = (
            (hello.job == self.job, "it is of another job"),
            (common_version(self.versions, hello.versions), _no_common_version(self.versions, hello.versions)),
            (hello.epoch == self.epoch, f"it is of epoch {hello.epoch}, here is epoch {self.epoch}"),
            (hello.receiver == self.rank, f"it looks for rank {hello.receiver}, here is rank {self.rank}"),
            (hello.sender in self.senders, f"rank {hello.sender} is not admitted"),
            (hello.purpose in self.purposes, f"purpose {hello.purpose.name} is not served"),
            (not self._lacks_tls(hello), _disagree_on_tls(is_needed_here=bool(self.features & TLS_NEEDED))),
        )
        return next((reason for is_right, reason in checks if not is_right), None)

    def answer(self, hello: Hello, nonce: bytes) -> Hello:
        """Return the HELLO that answers `hello`: with the agreed version, or with all versions if none is common."""
        version = common_version(self.versions, hello.versions)
        return dataclasses.replace(
            hello,
            job=self.job,
            epoch=self.epoch,
            sender=self.rank,
            receiver=hello.sender,
            versions=(version, version) if version else self.versions,
            features=self._agreed_features(hello),
            nonce=nonce,
        )

    def _agreed_features(self, hello: Hello) -> int:
        common = self.features & hello.features & ~(TLS | TLS_NEEDED)
        if self._lacks_tls(hello):
            return common | self.features & TLS_NEEDED
        return common | TLS if (self.features | hello.features) & TLS_NEEDED else common

    def _lacks_tls(self, hello: Hello) -> bool:
        """Return whether one side needs TLS, and the other cannot use it."""
        return bool((self.features | hello.features) & TLS_NEEDED and not self.features & hello.features & TLS)


def common_version(ours: tuple[int, int], theirs: tuple[int, int]) -> int:
    """Return the newest wire version that both ranges contain, or 0 if there is none (versions count from 1)."""
    newest = min(ours[1], theirs[1])
    return newest if newest >= max(ours[0], theirs[0]) else 0


def _no_common_version(ours: tuple[int, int], theirs: tuple[int, int]) -> str:
    return (
        f"no wire version is common: here {ours[0]} to {ours[1]}, there {theirs[0]} to {theirs[1]}; "
        "all ranks need the same release of Unisono"
    )


def _disagree_on_tls(*, is_needed_here: bool) -> str:
    needs, lacks = ("this side", "the other side") if is_needed_here else ("the other side", "this side")
    return f"{needs} needs TLS for this connection, and {lacks} has tls='off' or no OpenSSL"


class _Handshake:
    """A sequence of messages of known sizes, each answered by a function."""

    def __init__(self, stages: list[tuple[int, Callable[[bytes], bytes]]]) -> None:
        self._stages = stages
        self._received = bytearray()
        self._agreed: Hello | None = None
        self._secret = b""
        self.done = False

    @property
    def needed(self) -> int:
        """The number of bytes to read next. Never read more: the bytes after the handshake are not part of it."""
        return self._stages[0][0] - len(self._received) if self._stages else 0

    @property
    def agreed(self) -> Hello:
        """The HELLO of the other side, with the agreed version and features. Only when `done`."""
        if self._agreed is None or not self.done:
            raise InternalError("the handshake is not complete")
        return self._agreed

    @property
    def uses_tls(self) -> bool:
        """Whether TLS begins now, instead of the use of the connection. Only when `done`."""
        return bool(self.agreed.features & TLS)

    @property
    def secret(self) -> bytes:
        """The secret of this connection alone, of 32 bytes, which only holders of the key know. Only when `done`."""
        return self._secret

    def receive(self, data: bytes) -> bytes:
        """Accept received bytes, at most `needed`, and return the bytes to send. No bytes mean the end of the stream.

        Raises:
            HandshakeError: the handshake has failed, now or before; send its `reply` and close the connection.
        """
        try:
            return self._advance(data)
        except HandshakeError:
            self._stages.clear()
            raise

    def _advance(self, data: bytes) -> bytes:
        if not data:
            raise HandshakeError("the connection ended during the handshake")
        if len(data) > self.needed:
            raise HandshakeError("the other end sent more bytes than a HELLO has")
        self._received += data
        if self.needed:
            return b""
        message = bytes(self._received)
        self._received.clear()
        _, answer = self._stages.pop(0)
        reply = answer(message)
        self.done = not self._stages
        return reply


class DialerHandshake(_Handshake):
    """The handshake of the side that connects.

    Args:
        key: the job's key, 32 bytes.
        hello: the HELLO to send first; `opening` holds its bytes.
    """

    def __init__(self, key: bytes, hello: Hello) -> None:
        super().__init__([(HELLO_NBYTES + _PROOF_NBYTES, self._on_answer), (len(_READY), self._on_ready)])
        self._key = key
        self._hello = hello
        self.opening = hello.pack()

    @property
    def is_answered(self) -> bool:
        """Whether the acceptor has answered the HELLO, and the dialer has made its proof."""
        return bool(self._secret)

    def _on_answer(self, message: bytes) -> bytes:
        answer, proof = message[:HELLO_NBYTES], message[HELLO_NBYTES:]
        transcript = self.opening + answer
        if not hmac.compare_digest(proof, _proof(self._key, b"acceptor", transcript)):
            raise HandshakeError("the acceptor does not hold the key of this job")
        self._agreed = Hello.unpack(answer)
        self._check(self._agreed)
        self._secret = _proof(self._key, b"tls", transcript)
        if self._agreed.features & TLS:
            self._stages.clear()  # the acceptor is ready when it has confirmed TLS
        return _proof(self._key, b"dialer", transcript)

    def _check(self, answer: Hello) -> None:
        hello = self._hello
        first, last = answer.versions
        if first != last or not hello.versions[0] <= first <= hello.versions[1]:
            raise HandshakeError(_no_common_version(hello.versions, answer.versions))
        if answer.features & TLS_NEEDED:
            raise HandshakeError(_disagree_on_tls(is_needed_here=False))
        if hello.features & TLS_NEEDED and not answer.features & TLS:
            raise HandshakeError(_disagree_on_tls(is_needed_here=True))
        if answer.features & ~hello.features:
            raise HandshakeError("the acceptor chose features that were not offered")
        expected = dataclasses.replace(hello, sender=hello.receiver, receiver=hello.sender)
        for name in ("job", "epoch", "sender", "receiver", "purpose", "communicator", "lane"):
            here, there = getattr(expected, name), getattr(answer, name)
            if here != there:
                raise HandshakeError(f"the acceptor answers as {name} {there!r}, expected was {here!r}")

    def _on_ready(self, message: bytes) -> bytes:
        if message != _READY:
            raise HandshakeError("the acceptor sent other bytes than its confirmation at the end of the handshake")
        return b""


class AcceptorHandshake(_Handshake):
    """The handshake of the side that accepts.

    Args:
        key: the job's key, 32 bytes.
        admission: the identity of the acceptor, and the connections that it admits.
        nonce: 32 bytes; only tests pass it, to repeat a handshake.
    """

    def __init__(self, key: bytes, admission: Admission, nonce: bytes | None = None) -> None:
        super().__init__([(HELLO_NBYTES, self._on_hello), (_PROOF_NBYTES, self._on_proof)])
        self._key = key
        self._admission = admission
        self._nonce = nonce or os.urandom(_NONCE_NBYTES)
        self._expected_proof = b""

    def _on_hello(self, message: bytes) -> bytes:
        hello = Hello.unpack(message)
        admission = self._admission.serving(hello.purpose)
        answer = admission.answer(hello, self._nonce)
        transcript = message + answer.pack()
        reply = answer.pack() + _proof(self._key, b"acceptor", transcript)
        objection = admission.objection(hello)
        if objection:
            # A process of this job learns the reason; a process of another job learns nothing.
            raise HandshakeError(objection, reply if hello.job == admission.job else b"")
        self._agreed = dataclasses.replace(hello, versions=answer.versions, features=answer.features)
        self._expected_proof = _proof(self._key, b"dialer", transcript)
        self._secret = _proof(self._key, b"tls", transcript)
        return reply

    def _on_proof(self, message: bytes) -> bytes:
        if not hmac.compare_digest(message, self._expected_proof):
            raise HandshakeError("the dialer does not hold the key of this job")
        return b"" if self._agreed is not None and self._agreed.features & TLS else _READY


def _proof(key: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, role + transcript, "sha256")
