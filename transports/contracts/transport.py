"""The contracts of transports, which move the data of the generic executor.

A *message transport* moves messages between ranks. A *mapped transport* lets ranks use each other's memory. The native
executor has its own channels and uses neither.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from unisono.algorithms.ir.plan import Span
from unisono.records import record
from unisono.transports.contracts.call import Signature

if TYPE_CHECKING:
    pass

# Tags from this on are for messages inside calls, which no receive of any tag gets.
FIRST_RESERVED_TAG = 1 << 31


@record
class Traffic:
    """What one peer has been sent and has sent, over one transport.

    Memory that is read is sent by its owner, and memory that is written is received by its owner, as one message.
    """

    transport: str
    sent_messages: int = 0
    sent_nbytes: int = 0
    received_messages: int = 0
    received_nbytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        """Return both together, by the transport of the first."""
        return Traffic(
            self.transport,
            self.sent_messages + other.sent_messages,
            self.sent_nbytes + other.sent_nbytes,
            self.received_messages + other.received_messages,
            self.received_nbytes + other.received_nbytes,
        )


class Identity(NamedTuple):
    """What tells one message between two ranks of a communicator from another."""

    sequence: int
    lane: int
    group: int
    segment: int


class Request(Protocol):
    """A posted message of a message transport."""

    def done(self) -> bool:
        """Return whether the message has been sent, or received; never blocks. Raises the error that ended it."""


@record
class Capabilities:
    """What a transport can do.

    Attributes:
        kind: "message", "mapped" or "vendor".
        ordered: whether messages of one (lane, peer) arrive in the order in which they were sent.
        zero_copy: whether `post_send` reads the caller's memory until the request is done (it is frozen until then).
    """

    kind: str
    ordered: bool
    zero_copy: bool


class Published(Protocol):
    """The INPUT, OUTPUT and SCRATCH that a rank lets its peers use in one collective."""

    def bytes_to_read(self, span: Span, segment: int) -> list[memoryview]:
        """Return what `span` covers in `segment`, to be read: the memory of each block that is not empty."""

    def bytes_to_write(self, span: Span, segment: int) -> list[memoryview]:
        """Return what `span` covers in `segment`, to be written."""


class MappedTransport(Protocol):
    """Lets the ranks of one communicator use each other's memory. Every call is nonblocking.

    What a peer's memory holds is up to the flags: the plan orders every access, and the transport none.
    """

    def publish(self, sequence: int, memory: Published) -> None:
        """Let peers use `memory` in this rank's `sequence`-th collective, before any of its flags is raised."""

    def withdraw(self, sequence: int) -> None:
        """End what `publish` began. A later access to that memory raises `InternalError`, on every rank."""

    def read(self, peer: int, sequence: int, span: Span, segment: int, pieces: Sequence[memoryview]) -> Request:
        """Copy `span` of the memory of `peer` into `pieces` (contiguous, of bytes). Not called for zero bytes.

        A span of another length raises `MismatchError` from `Request.done`, and on every other rank.
        """

    def write(self, peer: int, sequence: int, span: Span, segment: int, pieces: Sequence[memoryview]) -> Request:
        """Copy `pieces` to `span` of the memory of `peer`; as `read`, the other way round."""

    def signal(self, peer: int, identity: Identity) -> Request:
        """Raise the flag of this identity at `peer`, which ends whether or not it is waited for."""

    def wait(self, peer: int, identity: Identity) -> Request:
        """Wait for `peer` to raise the flag of this identity."""


class MessageTransport(Protocol):
    """Moves messages between the ranks of one communicator, for the generic executor. Every call is nonblocking.

    Attributes:
        members: the number in the job of each rank.
        mapped: how the ranks use each other's memory, or None if they cannot. It is poisoned and closed with this.
    """

    name: str
    rank: int
    size: int
    capabilities: Capabilities
    mapped: MappedTransport | None
    members: tuple[int, ...]

    def subgroup(self, ranks: tuple[int, ...], number: int) -> MessageTransport:
        """Return the transport of a new communicator of these ranks, the `number`-th of the same ranks."""

    def announce(self, sequence: int, signature: Signature) -> None:
        """Tell what this rank calls as its `sequence`-th collective, before any message of that call is posted.

        A transport that learns that another rank calls something else there fails on every rank with `MismatchError`.
        """

    def absent(self, sequence: int) -> Collection[int]:
        """Return the ranks that are known not to have called their `sequence`-th collective yet, in ascending order."""

    def post_send(self, peer: int, identity: Identity, signature: Signature, pieces: Sequence[memoryview]) -> Request:
        """Send the concatenation of `pieces` (contiguous, of bytes) as one message.

        Messages of zero bytes are sent outside collectives only.
        """

    def post_recv(self, peer: int, identity: Identity, signature: Signature, pieces: Sequence[memoryview]) -> Request:
        """Receive the message of this identity from `peer` into `pieces` (contiguous, of bytes).

        A message of another signature (by its digest) or length under this identity raises `MismatchError` from
        `Request.done`, and on every other rank.
        """

    def arrived(self, peer: int, lane: int) -> Collection[tuple[Identity, Signature]]:
        """Return the messages of `peer` on a lane that can be received here, and that no receive was posted for."""

    def departed(self, peer: int) -> bool:
        """Return whether `peer` has left, so that nothing more will come from it than what has arrived."""

    def progress(self) -> None:
        """Move what can be moved. Raises the error that poisoned the transport."""

    def traffic(self) -> Mapping[int, Traffic]:
        """Return the counters, by peer."""

    def abort(self, error: Exception) -> None:
        """Make every pending and later request of every rank fail with `error`."""

    def close(self) -> None:
        """Leave the communicator."""
