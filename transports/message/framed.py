"""A message transport over anything that carries frames: who has links that move bytes needs nothing more.

Theory of operation
-------------------
Links carry whole frames between two ranks, in order. A frame is a header of fixed size, what the message is of (its
signature, as JSON) and its bytes. All communicators of a job use the same links; the header says for which one a frame
is. What comes for a communicator that is not there yet is kept for it, and what comes for one that is closed is
dropped.

A frame that finds its receive is copied into it; another one waits, by its identity, however many there are, so that a
sender is done as soon as the links have taken its message. Whoever fails tells all ranks why, and whoever leaves tells
those that it leaves; a link that ends without a word is a rank that has left all of them.

What ranks call is compared in the messages alone: ranks that disagree and exchange none are found by their time limit.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

from unisono import errors
from unisono.errors import AbortedError, InternalError, MismatchError, PeerLostError, UnisonoError, UsageError
from unisono.transports.contracts.call import Argument, Signature
from unisono.transports.contracts.transport import Capabilities, Identity, MappedTransport, Request, Traffic
from unisono.transports.message.plugin_loading import Bootstrap

_HEADER = struct.Struct("!BQQiqiI")  # kind, communicator, the identity, bytes of the signature or of the error
_MESSAGE, _LEFT, _FAILED = range(3)
_WORLD = 0
_NOWHERE = Identity(0, 0, 0, 0)
_MOST_TOLD = 4000


class FrameLinks(Protocol):
    """Carries frames between ranks of a job, each of which has one. Every call but `close` is nonblocking."""

    name: str

    def send(self, peer: int, parts: Sequence[memoryview]) -> Request:
        """Send the concatenation of `parts` to rank `peer` as one frame, after those sent before.

        The memory of `parts` is read until the request is done: the bytes are then out of reach of the caller, and come
        to `peer` if it lives, even if this rank closes its links. To a rank that has gone, nothing is sent.
        """

    def receive(self) -> Iterable[tuple[int, memoryview]]:
        """Return what has arrived: frames, each with the rank that sent it, in its order. They are the caller's.

        Whatever waits to be sent goes on, as far as it can.
        """

    def ended(self, peer: int) -> bool:
        """Return whether `peer` has gone, and `receive` has returned all that came from it."""

    def close(self) -> None:
        """Close the links, at once."""


class FramedTransport:
    """A `MessageTransport` of all ranks over `links`, which it owns.

    Args:
        links: this rank's.
        bootstrap: who this rank is.
    """

    capabilities = Capabilities(kind="message", ordered=True, zero_copy=True)
    mapped: MappedTransport | None = None

    def __init__(self, links: FrameLinks, bootstrap: Bootstrap) -> None:
        self._be(_Job(links), _WORLD, bootstrap.rank, bootstrap.members, tuple(range(bootstrap.size)))

    def _be(self, job: _Job, number: int, rank: int, members: tuple[int, ...], links: tuple[int, ...]) -> None:
        """Be the communicator of a number; `links` are its ranks, by their numbers on the links."""
        self.name = job.links.name
        self.rank, self.size, self.members = rank, len(members), members
        self._job, self._number, self._links = job, number, links
        self._ranks = {link: its_rank for its_rank, link in enumerate(links)}
        self._channels: dict[tuple[int, int], _Channel] = {}
        self._left: set[int] = set()
        self._traffic: dict[int, Traffic] = {}
        job.add(number, self)

    @property
    def links(self) -> FrameLinks:
        """The links of this rank, which all its communicators share."""
        return self._job.links

    def subgroup(self, ranks: tuple[int, ...], number: int) -> FramedTransport:
        made = object.__new__(FramedTransport)
        facts = repr((self._number, ranks, number))
        its_number = int.from_bytes(hashlib.sha256(facts.encode()).digest()[:8], "big")
        members, links = (tuple(each[rank] for rank in ranks) for each in (self.members, self._links))
        made._be(self._job, its_number, ranks.index(self.rank), members, links)
        return made

    def announce(self, sequence: int, signature: Signature) -> None:
        """Nothing is told: see above."""

    def absent(self, sequence: int) -> Collection[int]:
        return ()

    def post_send(self, peer: int, identity: Identity, signature: Signature, pieces: Sequence[memoryview]) -> Request:
        sent = _Sent(self, peer, sum(piece.nbytes for piece in pieces))
        if self._job.error is None and not self.departed(peer):
            head = memoryview(_framed(_MESSAGE, self._number, identity, _encoded(signature)))
            sent.request = self._job.send(self._links[peer], [head, *pieces])
        return sent

    def post_recv(self, peer: int, identity: Identity, signature: Signature, pieces: Sequence[memoryview]) -> Request:
        receive = _Receive(self, peer, identity, signature, pieces)
        if self._job.error is None:
            channel = self._channel(peer, identity.lane)
            message = channel.waiting.pop(identity, None)
            if message is None:
                channel.expected[identity] = receive
            else:
                self._deliver(message, receive)
        return receive

    def arrived(self, peer: int, lane: int) -> Collection[tuple[Identity, Signature]]:
        self._job.progress()
        return [(at, message.signature) for at, message in self._channel(peer, lane).waiting.items()]

    def departed(self, peer: int) -> bool:
        self._job.progress()
        return peer in self._left or self._job.links.ended(self._links[peer])

    def progress(self) -> None:
        self._job.progress()
        self.check()

    def traffic(self) -> Mapping[int, Traffic]:
        return dict(self._traffic)

    def abort(self, error: Exception) -> None:
        self._job.fail(error)

    def close(self) -> None:
        self._job.leave(self._number, self._links)

    def check(self) -> None:
        """Raise the error that ended the job, if one has."""
        if self._job.error is not None:
            raise copy.copy(self._job.error)

    def lost(self, peer: int) -> PeerLostError:
        """Return the error that `peer` has left."""
        name, me = self.members[peer], self.members[self.rank]
        return PeerLostError(f"rank {name} left while rank {me} still needed it", peer=name)

    def count(self, peer: int, **more: int) -> None:
        """Add to the counters of `peer`."""
        now = self._traffic.get(peer, Traffic(self.name))
        self._traffic[peer] = replace(now, **{name: getattr(now, name) + number for name, number in more.items()})

    def take(self, link: int, message: _Arrived | None) -> None:
        """Take a message of a rank, by its number on the links; None says that it has left."""
        if link not in self._ranks:
            raise InternalError(f"{self.name}: a rank sent to a communicator that it is not in")
        peer = self._ranks[link]
        if message is None:
            self._left.add(peer)
            return
        channel = self._channel(peer, message.identity.lane)
        if message.identity in channel.waiting:
            raise InternalError(f"rank {self.members[peer]} sent {message.identity} twice", peer=self.members[peer])
        receive = channel.expected.pop(message.identity, None)
        if receive is None:
            channel.waiting[message.identity] = message
        else:
            self._deliver(message, receive)

    def forget(self) -> None:
        """Drop what is pending; its memory is not touched any more."""
        self._channels.clear()

    def _channel(self, peer: int, lane: int) -> _Channel:
        return self._channels.setdefault((peer, lane), _Channel())

    def _deliver(self, message: _Arrived, receive: _Receive) -> None:
        peer, me = self.members[receive.peer], self.members[self.rank]
        expected = sum(piece.nbytes for piece in receive.pieces)
        if message.signature.digest != receive.signature.digest:
            mine, other = str(receive.signature), str(message.signature)
            if mine == other:
                mine += f" by {receive.signature.algorithm} in {receive.signature.segments} segments"
                other += f" by {message.signature.algorithm} in {message.signature.segments} segments"
            self._job.fail(MismatchError(f"rank {me} called {mine} where rank {peer} called {other}", peer=peer))
            return
        if message.payload.nbytes != expected:
            what = f"rank {peer} sent {message.payload.nbytes} bytes where rank {me} expected {expected}"
            self._job.fail(MismatchError(f"{what}, both in {receive.signature}", peer=peer))
            return
        start = 0
        for piece in receive.pieces:
            piece[:] = message.payload[start : start + piece.nbytes]
            start += piece.nbytes
        receive.complete = True
        self.count(receive.peer, received_messages=1, received_nbytes=expected)


class _Job:
    """What the communicators of a rank share: the links, and their end."""

    def __init__(self, links: FrameLinks) -> None:
        self.links = links
        self.error: Exception | None = None
        self._transports: dict[int, FramedTransport] = {}
        self._early: dict[int, list[tuple[int, _Arrived | None]]] = {}
        self._closed: set[int] = set()
        self._peers: set[int] = set()
        self._told: list[Request] = []  # what need not be waited for

    def add(self, number: int, transport: FramedTransport) -> None:
        """Add a communicator, and give it what has come for it."""
        self._transports[number] = transport
        self._peers |= set(transport._ranks) - {transport._links[transport.rank]}
        for frame in self._early.pop(number, ()):
            transport.take(*frame)

    def send(self, link: int, parts: Sequence[memoryview]) -> Request:
        """Post a frame; raises `UsageError` if the links return no request."""
        request = self.links.send(link, [part.cast("B") for part in parts if part.nbytes])
        if not callable(getattr(request, "done", None)):
            must = "it must return an object whose done() says whether the memory of the parts is free again"
            raise UsageError(f"{self.links.name}: send() returned {request!r}: {must}")
        return request

    def progress(self) -> None:
        """Take what has arrived."""
        if not self._transports:
            return
        for each in self._arrived():
            try:
                self._take(*self._checked(each))
            except UnisonoError as error:
                self.fail(error)
            except (struct.error, ValueError, TypeError, KeyError) as error:
                self.fail(InternalError(f"{self.links.name}: a rank sent what is no frame: {error}"))
        self._told = [request for request in self._told if not request.done()]

    def _arrived(self) -> Iterable[object]:
        """Return what the links have received; nothing, and the job fails, if that cannot be iterated over."""
        arrived: object = self.links.receive()
        if isinstance(arrived, Iterable):
            return arrived
        self.fail(self._wrong(f"receive() returned {arrived!r}"))
        return ()

    def _checked(self, arrived: object) -> tuple[int, memoryview]:
        """Return the sender and the frame; raises `UsageError` if the links gave something else."""
        match arrived:
            case (int(link), memoryview() as frame):
                return link, frame
        kinds = [type(part).__name__ for part in arrived] if isinstance(arrived, tuple) else type(arrived).__name__
        raise self._wrong(f"receive() gave {kinds}")

    def _wrong(self, problem: str) -> UsageError:
        return UsageError(f"{self.links.name}: {problem}: it must give pairs of the sender's rank and a memoryview")

    def fail(self, error: Exception, *, tell: bool = True) -> None:
        """End all communicators with `error`, unless they have ended before; tell the other ranks."""
        if self.error is not None:
            return
        self.error = error
        for transport in self._transports.values():
            transport.forget()
        for link in self._peers if tell else ():
            text = error.message if isinstance(error, UnisonoError) else str(error)
            told = [type(error).__name__, text[:_MOST_TOLD], getattr(error, "peer", None)]
            self._tell(link, _framed(_FAILED, _WORLD, _NOWHERE, json.dumps(told).encode()))

    def leave(self, number: int, links: Sequence[int]) -> None:
        """Close a communicator; with the last of them, the links."""
        transport = self._transports.pop(number, None)
        if transport is None:
            return
        self._closed.add(number)
        for link in set(links) - {links[transport.rank]}:
            self._tell(link, _framed(_LEFT, number, _NOWHERE, b""))
        if not self._transports:
            self.links.close()

    def _tell(self, link: int, frame: bytes) -> None:
        with contextlib.suppress(OSError, UsageError):  # it has gone; or the links break their contract, told before
            self._told.append(self.send(link, [memoryview(frame)]))

    def _take(self, link: int, frame: memoryview) -> None:
        kind, number, *identity, nbytes = _HEADER.unpack_from(frame)
        text, payload = frame[_HEADER.size : _HEADER.size + nbytes], frame[_HEADER.size + nbytes :]
        if kind == _FAILED:
            self.fail(_error_of(*json.loads(bytes(text))), tell=False)
            return
        message = _Arrived(Identity(*identity), _decoded(bytes(text)), payload) if kind == _MESSAGE else None
        if number in self._transports:
            self._transports[number].take(link, message)
        elif number not in self._closed and self.error is None:
            self._early.setdefault(number, []).append((link, message))


@dataclass(slots=True)
class _Arrived:
    """A message as it has come."""

    identity: Identity
    signature: Signature
    payload: memoryview


@dataclass(slots=True)
class _Channel:
    """The messages of a lane that have not met their receives, and the other way round."""

    waiting: dict[Identity, _Arrived] = field(default_factory=dict)
    expected: dict[Identity, _Receive] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Sent:
    """A posted message of `nbytes`; without a request, it was not sent."""

    transport: FramedTransport
    peer: int
    nbytes: int
    request: Request | None = None
    complete: bool = False

    def done(self) -> bool:
        if not self.complete:
            self.transport.check()
            gone = self.transport.departed(self.peer)
            if self.request is not None and self.request.done():
                self.complete = True
                self.transport.count(self.peer, sent_messages=1, sent_nbytes=self.nbytes)
            elif gone:
                raise self.transport.lost(self.peer)
        return self.complete


@dataclass(slots=True, eq=False)
class _Receive:
    """A posted receive."""

    transport: FramedTransport
    peer: int
    identity: Identity
    signature: Signature
    pieces: Sequence[memoryview]
    complete: bool = False

    def done(self) -> bool:
        if not self.complete:
            gone = self.transport.departed(self.peer)  # what it sent before it left has been taken then
            if not self.complete:
                self.transport.check()
                if gone:
                    raise self.transport.lost(self.peer)
        return self.complete


def _framed(kind: int, number: int, identity: Identity, text: bytes) -> bytes:
    return _HEADER.pack(kind, number, *identity, len(text)) + text


@lru_cache(maxsize=1024)
def _encoded(signature: Signature) -> bytes:
    return json.dumps(astuple(signature)).encode()


@lru_cache(maxsize=1024)
def _decoded(text: bytes) -> Signature:
    fields: list[Any] = json.loads(text)
    named = dict(zip(Signature.__dataclass_fields__, map(_frozen, fields), strict=True))
    named["others"] = tuple(Argument(*other) for other in named["others"])
    return Signature(**named)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _error_of(kind: str, text: str, peer: int | None) -> UnisonoError:
    """Return the error that another rank has told; of a kind that is not known here, an abort."""
    made = getattr(errors, kind, AbortedError)
    is_ours = isinstance(made, type) and issubclass(made, UnisonoError)
    return (made if is_ours else AbortedError)(text, peer=peer)
