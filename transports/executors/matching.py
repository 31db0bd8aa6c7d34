"""Matches point-to-point messages to receives, in the generic executor.

Theory of operation. Point-to-point messages have a lane of their own. In their identity, `group` is the tag, and
`sequence` numbers the messages of that tag and direction. A receive from one source and tag gets the next number when
it is posted. A receive from any source or of any tag gets none at first: it waits in a queue until a message arrives
that it accepts and whose number is next. A later receive that might accept the same message waits behind it, so the
receive that was posted first gets the message. The messages of this rank to itself are not in the transport, but in a
queue (`own_messages`).

A synchronous message travels between two empty ones of the same number, whose `segment` tells them from it. The sender
first sends a *question*. When the receiver has assigned the message to a receive, it receives the question and sends an
*answer*, with which the send ends. The question arrives before the message, because the transport keeps the order. So a
receive that ends has answered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from unisono.dtypes import DTYPES, DType
from unisono.errors import PeerLostError, UsageError
from unisono.transports.contracts.call import MESSAGE, Signature
from unisono.transports.contracts.executor import Message
from unisono.transports.contracts.transport import (
    ANY_OBJECT_TAG,
    FIRST_RESERVED_TAG,
    Identity,
    MessageTransport,
    Request,
)
from unisono.transports.executors.own_messages import OwnMessages

POINT_TO_POINT_LANE = -1
# The tags of receives that stand for several.
_ANY_TAGS = (None, ANY_OBJECT_TAG)
# The values of `segment`.
_PAYLOAD, _QUESTION, _ANSWER = 0, 1, 2


@dataclass(slots=True, eq=False)
class Receive:
    """The request of a posted receive.

    Attributes:
        source, tag: the rank and the tag that it accepts; None for any.
        request: the request of the transport, once a message is assigned to the receive.
        message: that message.
        takes: whether it takes a message of any signature, into memory of its own. Until then `pieces` is empty.
        question: the source and the identity of the question for the message that it has taken.
        looks_once: whether it ends without a message if none has arrived.
    """

    matching: Matching
    source: int | None
    tag: int | None
    signature: Signature
    pieces: Sequence[memoryview]
    request: Request | None = None
    message: Message | None = None
    takes: bool = False
    question: tuple[int, Identity] | None = None
    looks_once: bool = False

    def done(self) -> bool:
        if self.request is None:
            lost = self.matching.lost(self.source)
            self.matching.match()
            if self.request is None and lost is not None:
                raise lost
            if self.request is None and self.looks_once:
                self.matching.withdraw(self)
                return True
        return self.request is not None and self.request.done()

    def overlaps(self, other: Receive) -> bool:
        """Return whether both receives accept some common message."""
        if None not in (self.source, other.source) and self.source != other.source:
            return False
        both = (self.tag, other.tag), (other.tag, self.tag)
        return self.tag == other.tag or any(sent is not None and _accepts(tag, sent) for tag, sent in both)


class _Arrived(NamedTuple):
    """A message that has arrived, its number among those of its source and tag, and its signature."""

    message: Message
    number: int
    signature: Signature


class Matching:
    """Numbers the point-to-point messages of one rank over `transport`, and assigns them to receives."""

    def __init__(self, transport: MessageTransport) -> None:
        self._transport = transport
        self._sent: Counter[tuple[int, int]] = Counter()  # by peer and tag
        self._received: Counter[tuple[int, int]] = Counter()
        self._queue: list[Receive] = []
        self._held: set[tuple[int, Identity]] = set()  # messages that are taken and not received, with their sources
        self._answers: list[Request] = []
        self._own = OwnMessages(transport.members[transport.rank])

    def send(self, dest: int, tag: int, signature: Signature, pieces: Sequence[memoryview]) -> Request:
        """Post the next message of a tag."""
        return self._post_send(dest, self._next(self._sent, dest, tag), signature, pieces)

    def send_synchronously(self, dest: int, tag: int, signature: Signature, pieces: Sequence[memoryview]) -> Request:
        """Post the next message of a tag, and return a request that is done when a receive has got it.

        Raises:
            UsageError: the transport keeps no order.
        """
        if not self._transport.capabilities.ordered:
            raise UsageError(f"a synchronous send needs messages in order, which {self._transport.name} does not keep")
        identity = self._next(self._sent, dest, tag)
        question = self._post_send(dest, identity._replace(segment=_QUESTION), _EMPTY, (), buffers=False)
        answer = self._post_recv(dest, identity._replace(segment=_ANSWER), _EMPTY, ())
        return AllRequests([question, self._post_send(dest, identity, signature, pieces, buffers=False), answer])

    def has_answered(self, source: int) -> bool:
        """Answer the questions for messages of a rank that are assigned to a receive; return whether that is done."""
        for question in [identity for identity, _ in self._waiting(source) if identity.segment == _QUESTION]:
            if question.sequence < self._received[source, question.group] and (source, question) not in self._held:
                received = self._post_recv(source, question, _EMPTY, ())
                answer = self._post_send(source, question._replace(segment=_ANSWER), _EMPTY, ())
                self._answers += [received, answer]
        self._answers = [request for request in self._answers if not request.done()]
        return not self._answers

    def acknowledge(self, taken: Receive) -> Request:
        """Return a request that is done when the question for a message that has been taken is answered."""
        assert taken.question is not None, "a receive that takes a message notes its question"
        self._held.discard(taken.question)
        return _Answering(self, taken.question[0])

    def takes_own(self, tag: int, nbytes: int) -> bool:
        """Return whether a message to this rank itself could be sent now without another receive."""
        self.match()
        me = self._transport.rank
        waits = any(receive.source in (None, me) and _accepts(receive.tag, tag) for receive in self._queue)
        return waits or self._own.has_room(nbytes) or self._own.expects(tag)

    def receive(
        self, source: int | None, tag: int | None, signature: Signature, pieces: Sequence[memoryview]
    ) -> Receive:
        """Post a receive. None stands for any rank, and for any tag that is not reserved."""
        receive = Receive(self, source, tag, signature, pieces)
        if source is None or tag in _ANY_TAGS or any(map(receive.overlaps, self._queue)):
            self._queue.append(receive)
        else:
            self._assign(receive, source, tag)
        return receive

    def take(self, source: int | None, tag: int | None, once: bool) -> Receive:
        """Post a receive that takes the next message that it accepts, of any signature."""
        receive = Receive(self, source, tag, signature_of(DTYPES["uint8"], 0), (), takes=True, looks_once=once)
        self._queue.append(receive)
        return receive

    def withdraw(self, receive: Receive) -> None:
        """Remove a receive that has no message."""
        self._queue.remove(receive)

    def match(self) -> None:
        """Assign the messages that have arrived to the receives in the queue."""
        self._assign_all(self._arrived())

    def find(self, source: int | None, tag: int | None) -> Message | None:
        """Return the message that a receive posted now would get, if it has arrived.

        Raises:
            PeerLostError: it has not arrived, and every rank that could send it has left.
        """
        lost = self.lost(source)
        arrived = self._arrived()
        self._assign_all(arrived)
        found = self._first(arrived, source, tag)
        if found is None and lost is not None:
            raise lost
        return None if found is None else found.message

    def sources(self, source: int | None) -> Sequence[int]:
        """Return the ranks that `source` stands for: one rank, or all ranks for None."""
        return range(self._transport.size) if source is None else [source]

    def lost(self, source: int | None) -> PeerLostError | None:
        """Return the error to raise if every rank that could send the message has left; otherwise None.

        Call it before `match` and `find`: a rank may send a message and leave in between.
        """
        me, members = self._transport.rank, self._transport.members
        others = [peer for peer in self.sources(source) if peer != me]
        if not others or not all(map(self._transport.departed, others)):
            return None
        who = "all other ranks" if source is None else f"rank {members[source]}"
        return PeerLostError(f"{who} left while rank {members[me]} still needed a message", peer=members[others[-1]])

    def _arrived(self) -> list[_Arrived]:
        """Return the messages that have arrived and are not assigned to a receive."""
        return [
            _Arrived(_message(peer, identity, signature), identity.sequence, signature)
            for peer in self.sources(None)
            for identity, signature in self._waiting(peer)
            if identity.segment == _PAYLOAD
        ]

    def _waiting(self, peer: int) -> Collection[tuple[Identity, Signature]]:
        """Return all that has arrived from a rank and for which nothing is posted."""
        if peer == self._transport.rank:
            return self._own.arrived()
        return self._transport.arrived(peer, POINT_TO_POINT_LANE)

    def _post_send(
        self,
        dest: int,
        identity: Identity,
        signature: Signature,
        pieces: Sequence[memoryview],
        *,
        buffers: bool = True,
    ) -> Request:
        """Post a message; `buffers` allows to buffer one to this rank itself."""
        if dest == self._transport.rank:
            return self._own.post_send(identity, signature, pieces, buffers=buffers)
        return self._transport.post_send(dest, identity, signature, pieces)

    def _post_recv(
        self, source: int, identity: Identity, signature: Signature, pieces: Sequence[memoryview]
    ) -> Request:
        if source == self._transport.rank:
            return self._own.post_recv(identity, signature, pieces)
        return self._transport.post_recv(source, identity, signature, pieces)

    def _assign_all(self, arrived: list[_Arrived]) -> None:
        # All receives use one list: a message that arrives meanwhile must not go to a receive that was posted later.
        for receive in self._queue:
            found = self._first(arrived, receive.source, receive.tag)
            if found is None:
                continue
            if receive.takes:
                receive.signature = found.signature
                receive.pieces = [memoryview(bytearray(found.message.nbytes))]
            self._assign(receive, found.message.source, found.message.tag)
        self._queue = [receive for receive in self._queue if receive.request is None]

    def _first(self, arrived: list[_Arrived], source: int | None, tag: int | None) -> _Arrived | None:
        for each in arrived:
            message, number, _ = each
            is_next = number == self._received[message.source, message.tag]
            if _accepts(tag, message.tag) and is_next and source in (None, message.source):
                return each
        return None

    def _assign(self, receive: Receive, source: int, tag: int) -> None:
        identity = self._next(self._received, source, tag)
        receive.message = _message(source, identity, receive.signature)
        if receive.takes:
            receive.question = source, identity._replace(segment=_QUESTION)
            self._held.add(receive.question)
        receive.request = self._post_recv(source, identity, receive.signature, receive.pieces)

    def _next(self, numbers: Counter[tuple[int, int]], peer: int, tag: int) -> Identity:
        numbers[peer, tag] += 1
        return Identity(numbers[peer, tag] - 1, POINT_TO_POINT_LANE, tag, _PAYLOAD)


def _accepts(tag: int | None, sent: int) -> bool:
    """Return whether a receive with a tag, which may stand for several, accepts a message with the tag `sent`."""
    if tag is None:
        return sent < FIRST_RESERVED_TAG
    return FIRST_RESERVED_TAG <= sent < ANY_OBJECT_TAG if tag == ANY_OBJECT_TAG else sent == tag


class _Answering:
    """The request that is done when the questions of a rank are answered."""

    def __init__(self, matching: Matching, source: int) -> None:
        self._matching = matching
        self._source = source

    def done(self) -> bool:
        return self._matching.has_answered(self._source)


class AllRequests:
    """The request that is done when all of `requests` are."""

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests

    def done(self) -> bool:
        self._requests = [request for request in self._requests if not request.done()]
        return not self._requests


def signature_of(dtype: DType, count: int, shape: Sequence[int] = ()) -> Signature:
    """Return the signature of a message of `count` elements, on which sender and receiver must agree.

    Axes of length 1 do not count, and an array without elements is flat.
    """
    axes = tuple(length for length in shape if length != 1) if count else ()
    return Signature(MESSAGE, dtype.name, axes or (count,), "C", None, None, "direct", 1)


# The signature of a question and of an answer.
_EMPTY = signature_of(DTYPES["uint8"], 0)


def _message(source: int, identity: Identity, signature: Signature) -> Message:
    assert signature.dtype, "messages are of arrays"
    assert signature.shape, "messages are of arrays"
    return Message(source, identity.group, signature.dtype, prod(signature.shape))
