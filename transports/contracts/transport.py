"""The contracts of transports for the generic executor.

A *message transport* moves messages between ranks. A *mapped transport* lets ranks use each other's memory. The native
executor uses neither: it has channels of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from typing import NamedTuple, Protocol

from unisono.algorithms.ir.plan import Span
from unisono.foundation.records import record
from unisono.transports.contracts.call import Signature

# Tags from here on are reserved for messages inside calls. A receive of any tag does not accept them.
FIRST_RESERVED_TAG = 1 << 31
# Stands for the tags from there up to it, which are those of Python objects. The native core has the same number
# (core/endpoint/point_to_point.h).
ANY_OBJECT_TAG = 3 << 30
# The bytes of the buffer for messages of a rank to itself, on each communicator. Each message takes up some more bytes
# of it than its payload. The native core has the same numbers (core/endpoint/self_channel.h).
OWN_BUFFER_NBYTES = 1 << 20
OWN_MESSAGE_NBYTES = 64


@record
class Traffic:
    """Counters of the messages between this rank and one peer, over one transport.

    An access to mapped memory counts as one message: a read as sent by the owner, a write as received by the owner.

    Attributes:
        transport: the name of the transport.
        sent_messages, sent_nbytes, received_messages, received_nbytes: the numbers of messages and bytes.
        waited_s: the seconds in which calls waited for the peer; waits under a millisecond are not counted.
    """

    transport: str
    sent_messages: int = 0
    sent_nbytes: int = 0
    received_messages: int = 0
    received_nbytes: int = 0
    waited_s: float = field(default=0.0, compare=False)

    def __add__(self, other: Traffic) -> Traffic:
        """Return the sums of the counters, with the transport of the first."""
        return Traffic(
            self.transport,
            self.sent_messages + other.sent_messages,
            self.sent_nbytes + other.sent_nbytes,
            self.received_messages + other.received_messages,
            self.received_nbytes + other.received_nbytes,
            self.waited_s + other.waited_s,
        )


class Identity(NamedTuple):
    """The name of a message between two ranks of a communicator; no two messages in one direction share it.

    Attributes:
        sequence: the number of the call on the communicator.
        lane, group, segment: the lane, the group and the segment of its plan.
    """

    sequence: int
    lane: int
    group: int
    segment: int


class Request(Protocol):
    """A posted message of a message transport."""

    def done(self) -> bool:
        """Return whether the message has been sent or received, without blocking. Raises the error that ended it."""


@record
class Capabilities:
    """Properties of a transport.

    Attributes:
        kind: "message", "mapped" or "vendor".
        ordered: whether messages of one (lane, peer) arrive in the order in which they were sent.
        zero_copy: whether `post_send` reads the caller's memory until the request is done. The caller must not change
            it before.
    """

    kind: str
    ordered: bool
    zero_copy: bool


class Published(Protocol):
    """The INPUT, OUTPUT and SCRATCH that a rank lets its peers use in one collective."""

    def bytes_to_read(self, span: Span, segment: int) -> list[memoryview]:
        """Return the memory of `span` in `segment`, for reading: a view for each block that is not empty."""

    def bytes_to_write(self, span: Span, segment: int) -> list[memoryview]:
        """Return the memory of `span` in `segment`, for writing."""


class MappedTransport(Protocol):
    """Lets the ranks of one communicator use each other's memory. No method blocks.

    The transport does not order accesses. The plan orders them by flags (`signal` and `wait`).
    """

    def publish(self, sequence: int, memory: Published) -> None:
        """Let peers use `memory` in call `sequence`, before this rank raises any flag of that call."""

    def withdraw(self, sequence: int) -> None:
        """Undo `publish`. A later access to that memory raises `InternalError`, on every rank."""

    def read(self, peer: int, sequence: int, span: Span, segment: int, pieces: Sequence[memoryview]) -> Request:
        """Copy `span` of the memory of `peer` into `pieces`, which are contiguous bytes. Not called for zero bytes.

        If the span has another length than `pieces`, `Request.done` raises `MismatchError`, and so does every other
        rank.
        """

    def write(self, peer: int, sequence: int, span: Span, segment: int, pieces: Sequence[memoryview]) -> Request:
        """Copy `pieces` to `span` of the memory of `peer`, under the rules of `read`."""

    def signal(self, peer: int, identity: Identity) -> Request:
        """Raise the flag of this identity at `peer`; the request is done even if `peer` never waits for the flag."""

    def wait(self, peer: int, identity: Identity) -> Request:
        """Wait for `peer` to raise the flag of this identity."""


class MessageTransport(Protocol):
    """Moves messages between the ranks of one communicator, for the generic executor. No method blocks.

    Attributes:
        name: the name that the option `transports` and messages show.
        rank, size: this rank, and the number of ranks.
        capabilities: its properties.
        mapped: the mapped transport of the same ranks, or None. It fails and closes together with this transport.
        members: the number in the job of each rank.
    """

    name: str
    rank: int
    size: int
    capabilities: Capabilities
    mapped: MappedTransport | None
    members: tuple[int, ...]

    def subgroup(self, ranks: tuple[int, ...], number: int) -> MessageTransport:
        """Return the transport of a new communicator of these ranks; `number` counts those of the same ranks."""

    def announce(self, sequence: int, signature: Signature) -> None:
        """Announce the collective number `sequence` of this rank, before any message of that call is posted.

        If a transport learns that another rank announced another call under this number, it fails on every rank with
        `MismatchError`.
        """

    def absent(self, sequence: int) -> Collection[int]:
        """Return the ranks that are known not to have made call `sequence` yet, in ascending order."""

    def post_send(self, peer: int, identity: Identity, signature: Signature, pieces: Sequence[memoryview]) -> Request:
        """Send the concatenation of `pieces`, which are contiguous bytes, as one message.

        Only point-to-point messages may have zero bytes.
        """

    def post_recv(self, peer: int, identity: Identity, signature: Signature, pieces: Sequence[memoryview]) -> Request:
        """Receive the message of this identity from `peer` into `pieces`, which are contiguous bytes.

        If the message has another length, or its signature does not agree (`Signature.agrees`), `Request.done` raises
        `MismatchError`, and so does every other rank.
        """

    def arrived(self, peer: int, lane: int) -> Collection[tuple[Identity, Signature]]:
        """Return the messages of `peer` on a lane that have arrived and for which no receive is posted."""

    def departed(self, peer: int) -> bool:
        """Return whether `peer` has left and all its messages have arrived."""

    def progress(self) -> None:
        """Move data as far as is possible now. Raises the error that ended the transport."""

    def traffic(self) -> Mapping[int, Traffic]:
        """Return the counters, by peer."""

    def abort(self, error: Exception) -> None:
        """Make every pending and later request of every rank fail with `error`."""

    def close(self) -> None:
        """Leave the communicator."""
