"""The `local` transport: the ranks of a job as threads of one process.

Theory of operation
-------------------
The ranks of a communicator share a `LocalNetwork`. One lock guards the state of all networks of a job. A network has a
channel for every (source, destination, lane), which matches messages and receives by identity. If the receive is
posted, the message is copied at once from the sender's memory into the receiver's. Otherwise it waits in the channel.
While the channel has credit, a waiting message is copied into a buffer, so that its sender is done. With capacity 0
every sender waits for its receiver.

The network also compares the calls of the ranks (`announce`), as a control link would, and fails on all ranks as soon
as two of them disagree. After the first error no network of the job copies anything: the memory of pending messages is
not touched again.

Threads share their memory, so the transport also maps memory. The network stores what each rank has published, and the
flags that were raised and not yet waited for. It copies at once and does not check the order of accesses: the flags of
the plan must do that.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from unisono.algorithms.ir.plan import Span
from unisono.errors import InternalError, MismatchError, PeerLostError
from unisono.transports.contracts.call import Signature
from unisono.transports.contracts.transport import Capabilities, Identity, MappedTransport, Published, Request, Traffic

# The number of identities that a channel remembers, to refuse a message that is sent twice.
_DUPLICATE_WINDOW = 4096


class LocalNetwork:
    """The network of one communicator whose ranks are threads of this process.

    Attributes:
        transports: the transport of each rank.

    Args:
        size: number of ranks.
        capacity: number of messages that are buffered per lane from one rank to another. With 0, a send is done only
            when its receive is posted.
        parent: the network of the parent communicator, or None for all ranks of the job.
        members: the numbers of the ranks in the job; by default 0 to size − 1.
    """

    def __init__(
        self, size: int, capacity: int = 0, parent: LocalNetwork | None = None, members: tuple[int, ...] = ()
    ) -> None:
        self.size = size
        self.members = members or tuple(range(size))
        self._job: _SharedNetworks = _SharedNetworks() if parent is None else parent._job
        self._job.networks.append(self)
        self._subgroups: dict[tuple[tuple[int, ...], int], LocalNetwork] = {}
        self.transports = tuple(LocalTransport(self, rank) for rank in range(size))
        self._capacity = capacity
        self._lock = self._job.lock
        self._channels: dict[tuple[int, int, int], _LocalChannel] = {}
        self._calls: dict[int, _Announced] = {}
        self._closed: set[int] = set()
        self._published: dict[tuple[int, int], Published] = {}  # by rank and sequence
        self._flags: set[tuple[int, int, Identity]] = set()  # by source and destination
        self._traffic: list[dict[int, Traffic]] = [{} for _ in range(size)]

    @property
    def _error(self) -> Exception | None:
        return self._job.error

    def subgroup(self, ranks: tuple[int, ...], number: int) -> LocalNetwork:
        """Return the `number`-th network of these ranks, in this order; the first rank that asks creates it."""
        with self._lock:
            if (ranks, number) not in self._subgroups:
                members = tuple(self.members[rank] for rank in ranks)
                self._subgroups[ranks, number] = LocalNetwork(len(ranks), self._capacity, self, members)
            return self._subgroups[ranks, number]

    def announce(self, rank: int, sequence: int, signature: Signature) -> None:
        """Compare the call of `rank` with the same call of the other ranks, until all have announced it."""
        with self._lock:
            if self._error is not None:
                return
            call = self._calls.setdefault(sequence, _Announced(rank, signature))
            call.ranks.add(rank)
            if call.signature.digest != signature.digest:
                self.fail(self._mismatch(rank, signature, call.first, call.signature))
            elif len(call.ranks) == self.size:
                del self._calls[sequence]

    def absent(self, sequence: int) -> Collection[int]:
        """Return the ranks that have not announced call `sequence`; none if no rank has announced it."""
        with self._lock:
            call = self._calls.get(sequence)
            return [] if call is None else [rank for rank in range(self.size) if rank not in call.ranks]

    def send(self, source: int, dest: int, identity: Identity, signature: Signature, pieces: _Pieces) -> Request:
        """Post a message from `source` to `dest`, and return its request."""
        message = _LocalMessage(self, source, dest, signature, pieces)
        with self._lock:
            channel = self._channel(source, dest, identity.lane)
            if self._error is None and not channel.is_new(identity):
                self.fail(InternalError(f"{self._name(source)} sent {identity} to {self._name(dest)} twice"))
            if self._error is not None or dest in self._closed:
                return message
            receive = channel.expected.pop(identity, None)
            if receive is None:
                channel.waiting[identity] = message
                self._buffer(channel)
            else:
                self._deliver(message, receive)
        return message

    def receive(self, source: int, dest: int, identity: Identity, signature: Signature, pieces: _Pieces) -> Request:
        """Post a receive at `dest` of a message from `source`, and return its request."""
        receive = _LocalMessage(self, dest, source, signature, pieces)
        with self._lock:
            if self._error is not None:
                return receive
            channel = self._channel(source, dest, identity.lane)
            message = channel.waiting.pop(identity, None)
            if message is None:
                channel.expected[identity] = receive
            else:
                self._deliver(message, receive)
                channel.credit += message.buffered
                self._buffer(channel)
        return receive

    def arrived(self, source: int, dest: int, lane: int) -> Collection[tuple[Identity, Signature]]:
        """Return the messages that wait in a channel."""
        with self._lock:
            waiting = self._channel(source, dest, lane).waiting
            return [(identity, message.signature) for identity, message in waiting.items()]

    def departed(self, rank: int) -> bool:
        """Return whether `rank` has left."""
        with self._lock:
            return rank in self._closed

    def publish(self, rank: int, sequence: int, memory: Published) -> None:
        """Let the other ranks read and write the arrays of `rank` in call `sequence`."""
        with self._lock:
            if self._error is None:
                self._published[rank, sequence] = memory

    def withdraw(self, rank: int, sequence: int) -> None:
        """Stop the use of the arrays that `rank` has published for call `sequence`."""
        with self._lock:
            self._published.pop((rank, sequence), None)

    def access(self, access: _AccessRequest) -> Request:
        """Copy from or to the memory of a peer at once, and return `access` as the request."""
        with self._lock:
            if self._error is None and access.peer not in self._closed:
                self._copy_mapped(access)
        return access

    def raise_flag(self, source: int, dest: int, identity: Identity) -> None:
        """Raise a flag of `source` at `dest`."""
        with self._lock:
            if self._error is None:
                self._flags.add((source, dest, identity))

    def sees(self, flag: _Flag) -> bool:
        """Return whether a flag has been raised.

        If so, count it as seen, so that the next wait needs another raise. Raise an error if it can never be raised any
        more.
        """
        key = flag.peer, flag.rank, flag.identity
        with self._lock:
            if key not in self._flags:
                self._check_present(flag.rank, flag.peer)
                return False
            self._flags.discard(key)
            return True

    def check(self) -> None:
        """Raise the error that ended the network, if there is one."""
        with self._lock:
            if self._error is not None:
                raise copy.copy(self._error)

    def is_done(self, message: _LocalMessage | _AccessRequest) -> bool:
        """Return whether a message, a receive or an access is done. Raise an error if it can never be done any more."""
        with self._lock:
            if not message.complete:
                self._check_present(message.rank, message.peer)
            return message.complete

    def fail(self, error: Exception) -> None:
        """End the job with `error`, unless it has ended before; drop the pending messages of all its networks."""
        with self._lock:
            if self._job.error is None:
                self._job.error = error
            for network in self._job.networks:
                network._drop_all()

    def _drop_all(self) -> None:
        self._channels.clear()
        self._calls.clear()
        self._published.clear()
        self._flags.clear()

    def close(self, rank: int) -> None:
        """Drop the receives of `rank` and its messages that are not buffered; buffered messages can still arrive."""
        with self._lock:
            self._closed.add(rank)
            self._published = {key: memory for key, memory in self._published.items() if key[0] != rank}
            for (source, dest, _), channel in self._channels.items():
                if source == rank:
                    channel.waiting = {key: message for key, message in channel.waiting.items() if message.buffered}
                if dest == rank:
                    channel.expected.clear()

    def traffic(self, rank: int) -> Mapping[int, Traffic]:
        """Return the counters of `rank`, by peer."""
        with self._lock:
            return dict(self._traffic[rank])

    def _channel(self, source: int, dest: int, lane: int) -> _LocalChannel:
        return self._channels.setdefault((source, dest, lane), _LocalChannel(self._capacity))

    def _check_present(self, rank: int, peer: int) -> None:
        """Raise the error that ended the network, if any. Raise `PeerLostError` if `peer`, awaited by `rank`, left."""
        self.check()
        if peer in self._closed:
            text = f"{self._name(peer)} left while {self._name(rank)} still needed it"
            raise PeerLostError(text, peer=self.members[peer])

    def _name(self, rank: int) -> str:
        return f"rank {self.members[rank]}"

    def _mismatch(self, rank: int, call: Signature, other_rank: int, other_call: Signature) -> MismatchError:
        """Return the error that says how the calls of two ranks differ."""
        text, other_text = str(call), str(other_call)
        if text == other_text:
            text += f" by {call.algorithm} in {call.segments} segments"
            other_text += f" by {other_call.algorithm} in {other_call.segments} segments"
        return MismatchError(
            f"{self._name(rank)} called {text} where {self._name(other_rank)} called {other_text}",
            peer=self.members[rank],
        )

    def _copy_mapped(self, access: _AccessRequest) -> None:
        """Carry out an access; fail the job if the memory is not published or has another length than `pieces`."""
        text = f"{self._name(access.rank)} uses {access.span} of {self._name(access.peer)}"
        memory = self._published.get((access.peer, access.sequence))
        if memory is None:
            self.fail(InternalError(f"{text}, which is not published: the plan does not order this by flags"))
            return
        locate = memory.bytes_to_write if access.writes else memory.bytes_to_read
        pieces = locate(access.span, access.segment)
        mapped, own = _nbytes(pieces), _nbytes(access.pieces)
        if mapped != own:
            self.fail(
                MismatchError(f"{text}, which has {mapped} bytes instead of {own}", peer=self.members[access.peer])
            )
            return
        source, target = (access.pieces, pieces) if access.writes else (pieces, access.pieces)
        _copy(target, source)
        access.complete = True
        ends = (access.rank, access.peer) if access.writes else (access.peer, access.rank)
        self._count(*ends, sent_messages=1, sent_nbytes=own)
        self._count(*reversed(ends), received_messages=1, received_nbytes=own)

    def _deliver(self, message: _LocalMessage, receive: _LocalMessage) -> None:
        sent, expected = message.nbytes, receive.nbytes
        if not message.signature.agrees(receive.signature):
            self.fail(self._mismatch(message.rank, message.signature, receive.rank, receive.signature))
            return
        if sent != expected:
            text = f"{self._name(message.rank)} sent {sent} bytes where {self._name(receive.rank)} expected {expected}"
            self.fail(MismatchError(f"{text}, both in {message.signature}", peer=self.members[message.rank]))
            return
        _copy(receive.pieces, message.pieces)
        self._complete(message)
        receive.complete = True
        self._count(receive.rank, receive.peer, received_messages=1, received_nbytes=sent)

    def _buffer(self, channel: _LocalChannel) -> None:
        """Copy the oldest waiting messages into buffers while there is credit, so that their senders are done."""
        for message in channel.waiting.values():
            if channel.credit == 0:
                return
            if not message.buffered:
                message.pieces = [memoryview(b"".join(message.pieces))]
                message.buffered = True
                channel.credit -= 1
                self._complete(message)

    def _complete(self, message: _LocalMessage) -> None:
        """Mark `message` as sent and count it, if that has not been done before."""
        if not message.complete:
            message.complete = True
            self._count(message.rank, message.peer, sent_messages=1, sent_nbytes=message.nbytes)

    def _count(self, rank: int, peer: int, **increments: int) -> None:
        traffic = self._traffic[rank].get(peer, Traffic(LocalTransport.name))
        sums = {counter: getattr(traffic, counter) + increment for counter, increment in increments.items()}
        self._traffic[rank][peer] = replace(traffic, **sums)


class LocalTransport:
    """The `MessageTransport` of one rank of a `LocalNetwork`. Only one thread at a time may call it."""

    name = "local"
    capabilities = Capabilities(kind="message", ordered=True, zero_copy=True)

    def __init__(self, network: LocalNetwork, rank: int) -> None:
        self.rank = rank
        self.size = network.size
        self.members = network.members
        self.mapped: MappedTransport | None = LocalMemory(network, rank)
        self._network = network

    def subgroup(self, ranks: tuple[int, ...], number: int) -> LocalTransport:
        return self._network.subgroup(ranks, number).transports[ranks.index(self.rank)]

    def announce(self, sequence: int, signature: Signature) -> None:
        self._network.announce(self.rank, sequence, signature)

    def absent(self, sequence: int) -> Collection[int]:
        return self._network.absent(sequence)

    def post_send(self, peer: int, identity: Identity, signature: Signature, pieces: Sequence[memoryview]) -> Request:
        return self._network.send(self.rank, peer, identity, signature, pieces)

    def post_recv(self, peer: int, identity: Identity, signature: Signature, pieces: Sequence[memoryview]) -> Request:
        return self._network.receive(peer, self.rank, identity, signature, pieces)

    def arrived(self, peer: int, lane: int) -> Collection[tuple[Identity, Signature]]:
        return self._network.arrived(peer, self.rank, lane)

    def departed(self, peer: int) -> bool:
        return self._network.departed(peer)

    def progress(self) -> None:
        self._network.check()

    def traffic(self) -> Mapping[int, Traffic]:
        return self._network.traffic(self.rank)

    def abort(self, error: Exception) -> None:
        self._network.fail(error)

    def close(self) -> None:
        self._network.close(self.rank)


class LocalMemory:
    """The memory of peers, as one rank of a `LocalNetwork` uses it: the `MappedTransport` of this rank.

    `read` and `write` copy at once between arrays of two ranks, because all ranks are threads of one process.
    """

    def __init__(self, network: LocalNetwork, rank: int) -> None:
        self._network = network
        self._rank = rank

    def publish(self, sequence: int, memory: Published) -> None:
        self._network.publish(self._rank, sequence, memory)

    def withdraw(self, sequence: int) -> None:
        self._network.withdraw(self._rank, sequence)

    def read(self, peer: int, sequence: int, span: Span, segment: int, pieces: Sequence[memoryview]) -> Request:
        return self._network.access(
            _AccessRequest(self._network, self._rank, peer, sequence, span, segment, pieces, False)
        )

    def write(self, peer: int, sequence: int, span: Span, segment: int, pieces: Sequence[memoryview]) -> Request:
        return self._network.access(
            _AccessRequest(self._network, self._rank, peer, sequence, span, segment, pieces, True)
        )

    def signal(self, peer: int, identity: Identity) -> Request:
        self._network.raise_flag(self._rank, peer, identity)
        return _RAISED

    def wait(self, peer: int, identity: Identity) -> Request:
        return _Flag(self._network, self._rank, peer, identity)


_Pieces = Sequence[memoryview]


@dataclass(slots=True)
class _SharedNetworks:
    """The state that all networks of a job share: a lock, and the error that ended them."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    networks: list[LocalNetwork] = field(default_factory=list)
    error: Exception | None = None


@dataclass(slots=True)
class _Announced:
    """A call that only some `ranks` have announced: the `first` of them, and its signature."""

    first: int
    signature: Signature
    ranks: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _LocalMessage:
    """The request of `rank` for a message to `peer`, or for a receive from `peer`."""

    network: LocalNetwork
    rank: int
    peer: int
    signature: Signature
    pieces: _Pieces
    complete: bool = False
    buffered: bool = False

    @property
    def nbytes(self) -> int:
        return _nbytes(self.pieces)

    def done(self) -> bool:
        return self.network.is_done(self)


@dataclass(slots=True, eq=False)
class _AccessRequest:
    """The request of `rank` to copy a span of the memory of `peer` into `pieces`; from `pieces` to it if `writes`."""

    network: LocalNetwork
    rank: int
    peer: int
    sequence: int
    span: Span
    segment: int
    pieces: _Pieces
    writes: bool
    complete: bool = False

    def done(self) -> bool:
        return self.network.is_done(self)


@dataclass(slots=True, eq=False)
class _Flag:
    """The request of `rank` that waits for a flag of `peer`."""

    network: LocalNetwork
    rank: int
    peer: int
    identity: Identity

    def done(self) -> bool:
        return self.network.sees(self)


class _Raised:
    """The request of a flag that has been raised; it is always done."""

    def done(self) -> bool:
        return True


_RAISED = _Raised()


@dataclass(slots=True)
class _LocalChannel:
    """The unmatched messages and receives of one lane from one rank to another."""

    credit: int
    waiting: dict[Identity, _LocalMessage] = field(default_factory=dict)
    expected: dict[Identity, _LocalMessage] = field(default_factory=dict)
    recent: OrderedDict[Identity, None] = field(default_factory=OrderedDict)

    def is_new(self, identity: Identity) -> bool:
        """Return whether `identity` is not among the last 4,096 that the channel has seen, and remember it."""
        if identity in self.recent:
            return False
        self.recent[identity] = None
        if len(self.recent) > _DUPLICATE_WINDOW:
            self.recent.popitem(last=False)
        return True


def _nbytes(pieces: _Pieces) -> int:
    return sum(piece.nbytes for piece in pieces)


def _copy(dst: _Pieces, src: _Pieces) -> None:
    data = src[0] if len(src) == 1 else memoryview(b"".join(src))
    start = 0
    for piece in dst:
        piece[:] = data[start : start + piece.nbytes]
        start += piece.nbytes
