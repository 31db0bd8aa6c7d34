"""`FramedTransport`: a complete message transport over links that only carry frames.

Used by: authors of transports, who write `FrameLinks` and get the rest; `ucx/python_links.py`.

Theory of operation
-------------------
Links carry whole frames between two ranks, in order. A frame is a header of fixed size, the signature of the message as
JSON, and the payload. All communicators of a job share the links, and the header names the communicator. A frame for a
communicator that does not exist yet is kept until it is made. A frame for a closed communicator is dropped.

If the receive of a message is posted, the payload is copied into it. Otherwise the message waits under its identity.
The number of waiting messages has no limit, so a sender is done as soon as the links have taken its frame.

A rank that fails sends its error to all ranks. A rank that closes a communicator sends LEFT to its members. If the
links of a rank end without a frame, that rank counts as having left all communicators.

Signatures are compared only when a message arrives. Ranks that disagree but exchange no message run into their time
limit.
"""

from __future__ import annotations

import contextlib
import copy
import json
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import lru_cache
from types import NoneType
from typing import Any, Protocol

from unisono import errors
from unisono.errors import AbortedError, InternalError, MismatchError, PeerLostError, UnisonoError, UsageError
from unisono.foundation.json_checks import checked, parsed_json
from unisono.transports.contracts.call import Argument, Signature
from unisono.transports.contracts.communicator_id import communicator_id
from unisono.transports.contracts.transport import Capabilities, Identity, MappedTransport, Request, Traffic
from unisono.transports.message.plugin import Bootstrap

_HEADER = struct.Struct("!BQQiqiI")  # kind, communicator, the identity, bytes of the signature or of the error
_MESSAGE, _LEFT, _FAILED = range(3)
_WORLD = 0
_NO_IDENTITY = Identity(0, 0, 0, 0)
_SHAPE_OF_ARGUMENT = {
    **dict.fromkeys(("dtype", "op"), (str, NoneType)),
    "shape": (list, NoneType),
    "order": str,
}
_SHAPE_OF_SIGNATURE = {
    **_SHAPE_OF_ARGUMENT,
    **dict.fromkeys(("collective", "algorithm", "memory"), str),
    **dict.fromkeys(("accumulate", "asked"), (str, NoneType)),
    "root": (int, NoneType),
    "segments": int,
    "counts": (list, NoneType),
    "reproducible": bool,
    "others": [list],
}
_LONGEST_ERROR = 4000  # characters of an error that other ranks receive


class FrameLinks(Protocol):
    """One rank's links to the other ranks of the job, which carry frames. No method but `close` may block."""

    name: str

    def send(self, peer: int, parts: Sequence[memoryview]) -> Request:
        """Send the concatenation of `parts` to rank `peer` as one frame, after the frames sent before.

        The links read the memory of `parts` until the returned request is done. From then on the caller may change
        it, and the frame arrives if `peer` lives, even if this rank closes its links. A frame to a peer that has gone
        is dropped.
        """

    def receive(self) -> Iterable[tuple[int, memoryview]]:
        """Return the frames that have arrived, each with its sender, and in the order of the sender.

        The frames belong to the caller. The method also sends waiting frames, as many as the links can take.
        """

    def ended(self, peer: int) -> bool:
        """Return whether `peer` has gone and `receive` has returned all its frames."""

    def close(self) -> None:
        """Close the links without waiting for a peer."""


class FramedTransport:
    """A `MessageTransport` of all ranks of a job over `links`, which it owns.

    Args:
        links: the links of this rank.
        bootstrap: the argument of the factory.
    """

    capabilities = Capabilities(kind="message", ordered=True, zero_copy=True)
    mapped: MappedTransport | None = None

    def __init__(self, links: FrameLinks, bootstrap: Bootstrap) -> None:
        self._join(_SharedLinks(links), _WORLD, bootstrap.rank, bootstrap.members, tuple(range(bootstrap.size)))

    def _join(
        self, job: _SharedLinks, communicator: int, rank: int, members: tuple[int, ...], links: tuple[int, ...]
    ) -> None:
        """Initialise this object as one communicator of `job`; `links` maps its ranks to their numbers on the links."""
        self.name = job.links.name
        self.rank, self.size, self.members = rank, len(members), members
        self._job, self._communicator, self._links = job, communicator, links
        self._ranks = {link: peer for peer, link in enumerate(links)}
        self._channels: dict[tuple[int, int], _FrameChannel] = {}
        self._departed: set[int] = set()
        self._traffic: dict[int, Traffic] = {}
        job.add(communicator, self)

    @property
    def links(self) -> FrameLinks:
        """The links of this rank; all its communicators share them."""
        return self._job.links

    def subgroup(self, ranks: tuple[int, ...], number: int) -> FramedTransport:
        subgroup = object.__new__(FramedTransport)
        communicator = communicator_id(self._communicator, ranks, number)
        members, links = (tuple(table[rank] for rank in ranks) for table in (self.members, self._links))
        subgroup._join(self._job, communicator, ranks.index(self.rank), members, links)
        return subgroup

    def announce(self, sequence: int, signature: Signature) -> None:
        """Do nothing: signatures are compared when messages arrive."""

    def absent(self, sequence: int) -> Collection[int]:
        return ()

    def post_send(self, peer: int, identity: Identity, signature: Signature, pieces: Sequence[memoryview]) -> Request:
        send = _PostedSend(self, peer, sum(piece.nbytes for piece in pieces))
        if self._job.error is None and not self.departed(peer):
            head = memoryview(_framed(_MESSAGE, self._communicator, identity, _encoded(signature)))
            send.request = self._job.send(self._links[peer], [head, *pieces])
        return send

    def post_recv(self, peer: int, identity: Identity, signature: Signature, pieces: Sequence[memoryview]) -> Request:
        receive = _PostedReceive(self, peer, identity, signature, pieces)
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
        waiting = self._channel(peer, lane).waiting
        return [(identity, message.signature) for identity, message in waiting.items()]

    def departed(self, peer: int) -> bool:
        self._job.progress()
        return peer in self._departed or self._job.links.ended(self._links[peer])

    def progress(self) -> None:
        self._job.progress()
        self.check()

    def traffic(self) -> Mapping[int, Traffic]:
        return dict(self._traffic)

    def abort(self, error: Exception) -> None:
        self._job.fail(error)

    def close(self) -> None:
        self._job.leave(self._communicator, self._links)

    def check(self) -> None:
        """Raise the error that ended the job, if one has."""
        if self._job.error is not None:
            raise copy.copy(self._job.error)

    def lost(self, peer: int) -> PeerLostError:
        """Return the error that says that `peer` has left."""
        name, me = self.members[peer], self.members[self.rank]
        return PeerLostError(f"rank {name} left while rank {me} still needed it", peer=name)

    def count(self, peer: int, **increments: int) -> None:
        """Add `increments` to the counters of `peer`."""
        traffic = self._traffic.get(peer, Traffic(self.name))
        sums = {name: getattr(traffic, name) + increment for name, increment in increments.items()}
        self._traffic[peer] = replace(traffic, **sums)

    def take(self, link: int, message: _ArrivedFrame | None) -> None:
        """Accept a message of the rank with number `link` on the links; None means that this rank has left."""
        if link not in self._ranks:
            raise InternalError(f"{self.name}: a rank sent a message to a communicator that it does not belong to")
        peer = self._ranks[link]
        if message is None:
            self._departed.add(peer)
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
        """Drop all pending receives and waiting messages; the memory of the receives is not written any more."""
        self._channels.clear()

    def _channel(self, peer: int, lane: int) -> _FrameChannel:
        return self._channels.setdefault((peer, lane), _FrameChannel())

    def _deliver(self, message: _ArrivedFrame, receive: _PostedReceive) -> None:
        peer, me = self.members[receive.peer], self.members[self.rank]
        expected = sum(piece.nbytes for piece in receive.pieces)
        if not message.signature.agrees(receive.signature):
            ours, theirs = str(receive.signature), str(message.signature)
            if ours == theirs:
                ours += f" by {receive.signature.algorithm} in {receive.signature.segments} segments"
                theirs += f" by {message.signature.algorithm} in {message.signature.segments} segments"
            self._job.fail(MismatchError(f"rank {me} called {ours} where rank {peer} called {theirs}", peer=peer))
            return
        if message.payload.nbytes != expected:
            lengths = f"rank {peer} sent {message.payload.nbytes} bytes where rank {me} expected {expected}"
            self._job.fail(MismatchError(f"{lengths}, both in {receive.signature}", peer=peer))
            return
        start = 0
        for piece in receive.pieces:
            piece[:] = message.payload[start : start + piece.nbytes]
            start += piece.nbytes
        receive.complete = True
        self.count(receive.peer, received_messages=1, received_nbytes=expected)


class _SharedLinks:
    """The state that all communicators of a rank share: the links, and the error that ended them."""

    def __init__(self, links: FrameLinks) -> None:
        self.links = links
        self.error: Exception | None = None
        self._transports: dict[int, FramedTransport] = {}
        self._early: dict[int, list[tuple[int, _ArrivedFrame | None]]] = {}
        self._closed: set[int] = set()
        self._peers: set[int] = set()
        self._notices: list[Request] = []  # FAILED and LEFT frames on their way; nobody waits for them

    def add(self, communicator: int, transport: FramedTransport) -> None:
        """Add a communicator, and hand it the frames that arrived before it was made."""
        self._transports[communicator] = transport
        self._peers |= set(transport._ranks) - {transport._links[transport.rank]}
        for frame in self._early.pop(communicator, ()):
            transport.take(*frame)

    def send(self, link: int, parts: Sequence[memoryview]) -> Request:
        """Post a frame; raises `UsageError` if the links return no request."""
        request = self.links.send(link, [part.cast("B") for part in parts if part.nbytes])
        if not callable(getattr(request, "done", None)):
            rule = "it must return an object whose done() says whether the memory of the parts is free again"
            raise UsageError(f"{self.links.name}: send() returned {request!r}: {rule}")
        return request

    def progress(self) -> None:
        """Handle all frames that have arrived."""
        if not self._transports:
            return
        for arrival in self._arrivals():
            try:
                self._take(*self._checked(arrival))
            except UnisonoError as error:
                self.fail(error)
            except (struct.error, ValueError) as error:
                self.fail(InternalError(f"{self.links.name}: a rank sent a malformed frame: {error}"))
        self._notices = [request for request in self._notices if not request.done()]

    def _arrivals(self) -> Iterable[object]:
        """Return the result of `FrameLinks.receive`; if it is not iterable, fail the job and return nothing."""
        arrivals: object = self.links.receive()
        if isinstance(arrivals, Iterable):
            return arrivals
        self.fail(self._misuse(f"receive() returned {arrivals!r}"))
        return ()

    def _checked(self, arrival: object) -> tuple[int, memoryview]:
        """Return the sender and the frame; raises `UsageError` if the links returned something else."""
        match arrival:
            case (int(link), memoryview() as frame):
                return link, frame
        types = [type(part).__name__ for part in arrival] if isinstance(arrival, tuple) else type(arrival).__name__
        raise self._misuse(f"receive() yielded {types}")

    def _misuse(self, problem: str) -> UsageError:
        return UsageError(f"{self.links.name}: {problem}: it must yield pairs of the sender's rank and a memoryview")

    def fail(self, error: Exception, *, tell: bool = True) -> None:
        """End all communicators with `error`, unless they have ended before; `tell` the other ranks."""
        if self.error is not None:
            return
        self.error = error
        for transport in self._transports.values():
            transport.forget()
        for link in self._peers if tell else ():
            text = error.message if isinstance(error, UnisonoError) else str(error)
            report = [type(error).__name__, text[:_LONGEST_ERROR], getattr(error, "peer", None)]
            self._notify(link, _framed(_FAILED, _WORLD, _NO_IDENTITY, json.dumps(report).encode()))

    def leave(self, communicator: int, links: Sequence[int]) -> None:
        """Close a communicator; the last one to be closed also closes the links."""
        transport = self._transports.pop(communicator, None)
        if transport is None:
            return
        self._closed.add(communicator)
        for link in set(links) - {links[transport.rank]}:
            self._notify(link, _framed(_LEFT, communicator, _NO_IDENTITY, b""))
        if not self._transports:
            self.links.close()

    def _notify(self, link: int, frame: bytes) -> None:
        # OSError: the peer has gone. UsageError: the links break their contract, which an earlier error has said.
        with contextlib.suppress(OSError, UsageError):
            self._notices.append(self.send(link, [memoryview(frame)]))

    def _take(self, link: int, frame: memoryview) -> None:
        kind, communicator, *identity, nbytes = _HEADER.unpack_from(frame)
        text, payload = frame[_HEADER.size : _HEADER.size + nbytes], frame[_HEADER.size + nbytes :]
        if kind == _FAILED:
            self.fail(_error_of(parsed_json(bytes(text))), tell=False)
            return
        message = _ArrivedFrame(Identity(*identity), _decoded(bytes(text)), payload) if kind == _MESSAGE else None
        if communicator in self._transports:
            self._transports[communicator].take(link, message)
        elif communicator not in self._closed and self.error is None:
            self._early.setdefault(communicator, []).append((link, message))


@dataclass(slots=True)
class _ArrivedFrame:
    """A message that has arrived."""

    identity: Identity
    signature: Signature
    payload: memoryview


@dataclass(slots=True)
class _FrameChannel:
    """The unmatched messages and receives between this rank and one peer on one lane."""

    waiting: dict[Identity, _ArrivedFrame] = field(default_factory=dict)
    expected: dict[Identity, _PostedReceive] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _PostedSend:
    """The request of a posted message of `nbytes`; its `request` is None if nothing was sent."""

    transport: FramedTransport
    peer: int
    nbytes: int
    request: Request | None = None
    complete: bool = False

    def done(self) -> bool:
        if not self.complete:
            self.transport.check()
            has_departed = self.transport.departed(self.peer)
            if self.request is not None and self.request.done():
                self.complete = True
                self.transport.count(self.peer, sent_messages=1, sent_nbytes=self.nbytes)
            elif has_departed:
                raise self.transport.lost(self.peer)
        return self.complete


@dataclass(slots=True, eq=False)
class _PostedReceive:
    """The request of a posted receive."""

    transport: FramedTransport
    peer: int
    identity: Identity
    signature: Signature
    pieces: Sequence[memoryview]
    complete: bool = False

    def done(self) -> bool:
        if not self.complete:
            has_departed = self.transport.departed(self.peer)  # this also takes what the peer sent before it left
            if not self.complete:
                self.transport.check()
                if has_departed:
                    raise self.transport.lost(self.peer)
        return self.complete


def _framed(kind: int, communicator: int, identity: Identity, text: bytes) -> bytes:
    return _HEADER.pack(kind, communicator, *identity, len(text)) + text


@lru_cache(maxsize=1024)
def _encoded(signature: Signature) -> bytes:
    return json.dumps(astuple(signature)).encode()


@lru_cache(maxsize=1024)
def _decoded(text: bytes) -> Signature:
    fields: list[Any] = checked(parsed_json(text), list)
    named = dict(zip(Signature.__dataclass_fields__, fields, strict=True))
    checked(named, _SHAPE_OF_SIGNATURE)
    for other in named["others"]:
        checked(dict(zip(Argument._fields, other, strict=True)), _SHAPE_OF_ARGUMENT)
    for numbers in (named["shape"], named["counts"], *(other[1] for other in named["others"])):
        checked([] if numbers is None else numbers, [int])
    named = {name: _frozen(value) for name, value in named.items()}
    named["others"] = tuple(Argument(*other) for other in named["others"])
    return Signature(**named)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _error_of(report: Any) -> UnisonoError:
    """Return the error that another rank has sent; an `AbortedError` if this rank has no error class of this name."""
    kind, text, peer = checked(report, list)
    checked({"kind": kind, "text": text, "peer": peer}, {"kind": str, "text": str, "peer": (int, NoneType)})
    error_class = getattr(errors, kind, AbortedError)
    is_ours = isinstance(error_class, type) and issubclass(error_class, UnisonoError)
    return (error_class if is_ours else AbortedError)(text, peer=peer)
