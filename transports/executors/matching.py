"""Which message goes to which receive, outside collectives, in the generic executor.

Theory of operation. Messages between two ranks travel on a lane of their own, where `group` is the tag and `sequence`
numbers the messages of that tag and direction. A receive of one source and tag is given the next number when it is
posted. One that may get messages of several is given none: it queues until a message has arrived that it accepts and
whose number is next; and behind it queues whoever might accept the same, so that the first posted is the first served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.dtypes import DType
from unisono.errors import PeerLostError
from unisono.transports.contracts.call import Signature
from unisono.transports.contracts.executor import Message
from unisono.transports.contracts.transport import FIRST_RESERVED_TAG, Identity, MessageTransport, Request

POINT_TO_POINT_LANE = -1


@dataclass(slots=True, eq=False)
class Receive:
    """A posted receive: a request, and from when it is known which message it gets, that of the transport.

    Attributes:
        source, tag: what it accepts; None for any.
        message: what it gets, once that is known.
    """

    matching: Matching
    source: int | None
    tag: int | None
    signature: Signature
    pieces: Sequence[memoryview]
    request: Request | None = None
    message: Message | None = None

    def done(self) -> bool:
        if self.request is None:
            lost = self.matching.lost(self.source)
            self.matching.match()
            if self.request is None and lost is not None:
                raise lost
        return self.request is not None and self.request.done()

    def may_want_same(self, other: Receive) -> bool:
        """Return whether there may be a message that both accept."""
        pairs = (self.source, other.source), (self.tag, other.tag)
        return all(mine is None or its is None or mine == its for mine, its in pairs)


class Matching:
    """The messages outside collectives that one rank sends and receives over `transport`."""

    def __init__(self, transport: MessageTransport) -> None:
        self._transport = transport
        self._sent: Counter[tuple[int, int]] = Counter()  # by peer and tag
        self._received: Counter[tuple[int, int]] = Counter()
        self._queue: list[Receive] = []

    def send(self, dest: int, tag: int, signature: Signature, pieces: Sequence[memoryview]) -> Request:
        """Post a message, the next of its tag."""
        identity = self._next(self._sent, dest, tag)
        return self._transport.post_send(dest, identity, signature, pieces)

    def receive(
        self, source: int | None, tag: int | None, signature: Signature, pieces: Sequence[memoryview]
    ) -> Receive:
        """Post a receive, from any other rank or of any tag that is not reserved where None is given."""
        receive = Receive(self, source, tag, signature, pieces)
        if source is None or tag is None or any(map(receive.may_want_same, self._queue)):
            self._queue.append(receive)
        else:
            self._assign(receive, source, tag)
        return receive

    def match(self) -> None:
        """Give what has arrived to the receives that queue."""
        self._give(self._arrived())

    def find(self, source: int | None, tag: int | None) -> Message | None:
        """Return the message that a receive posted now would get, if it has arrived.

        Raises:
            PeerLostError: it has not, and all that it might come from have left.
        """
        lost = self.lost(source)
        arrived = self._arrived()
        self._give(arrived)
        found = self._first(arrived, source, tag)
        if found is None and lost is not None:
            raise lost
        return found

    def sources(self, source: int | None) -> Sequence[int]:
        """Return the ranks that a message from `source`, or any, may come from."""
        transport = self._transport
        return [peer for peer in range(transport.size) if peer != transport.rank] if source is None else [source]

    def lost(self, source: int | None) -> PeerLostError | None:
        """Return the error that all have left that a message might come from, if so.

        To be asked before `match` and `find`, for a rank may send and leave in between.
        """
        sources, members = self.sources(source), self._transport.members
        if not all(map(self._transport.departed, sources)):
            return None
        who = "all other ranks" if source is None else f"rank {members[source]}"
        me = members[self._transport.rank]
        return PeerLostError(f"{who} left while rank {me} still needed a message", peer=members[sources[-1]])

    def _arrived(self) -> list[tuple[Message, int]]:
        """Return the messages that have arrived and have not been given to a receive, with their numbers."""
        return [
            (_message(peer, identity, signature), identity.sequence)
            for peer in self.sources(None)
            for identity, signature in self._transport.arrived(peer, POINT_TO_POINT_LANE)
        ]

    def _give(self, arrived: list[tuple[Message, int]]) -> None:
        # All look at the same: what arrives meanwhile must not get to a receive before one that was posted earlier.
        for receive in self._queue:
            message = self._first(arrived, receive.source, receive.tag)
            if message is not None:
                self._assign(receive, message.source, message.tag)
        self._queue = [receive for receive in self._queue if receive.request is None]

    def _first(self, arrived: list[tuple[Message, int]], source: int | None, tag: int | None) -> Message | None:
        for message, number in arrived:
            accepts = message.tag < FIRST_RESERVED_TAG if tag is None else message.tag == tag
            is_next = number == self._received[message.source, message.tag]
            if accepts and is_next and source in (None, message.source):
                return message
        return None

    def _assign(self, receive: Receive, source: int, tag: int) -> None:
        identity = self._next(self._received, source, tag)
        receive.message = _message(source, identity, receive.signature)
        receive.request = self._transport.post_recv(source, identity, receive.signature, receive.pieces)

    def _next(self, numbers: Counter[tuple[int, int]], peer: int, tag: int) -> Identity:
        numbers[peer, tag] += 1
        return Identity(numbers[peer, tag] - 1, POINT_TO_POINT_LANE, tag, 0)


def signature_of(dtype: DType, count: int) -> Signature:
    """Return what both ends of a message must agree on."""
    return Signature("send/recv", dtype.name, (count,), "C", None, None, "direct", 1)


def _message(source: int, identity: Identity, signature: Signature) -> Message:
    assert signature.dtype, "messages are of arrays"
    assert signature.shape, "messages are of arrays"
    return Message(source, identity.group, signature.dtype, signature.shape[0])
