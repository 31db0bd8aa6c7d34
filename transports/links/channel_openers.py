"""Opens the channels of each transport, on the rank that dials and on the rank that is dialled.

`CHANNELS` has a row for each transport of the native core; a new one is another row and its opener. The session dials
as many authenticated sockets as the opener needs, and hands them to it. On the dialled rank, the session hands each
socket to the opener when it arrives. Openers run in the event loop of the listener and never wait: they read what the
other rank sends when it has arrived.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

from unisono.options import MOST_TCP_STREAMS, Options
from unisono.transports import _core
from unisono.transports.links.event_loop import EventLoop
from unisono.transports.links.handshake import Hello, Purpose
from unisono.transports.links.pending_sockets import ChannelKey, Done, PendingSockets
from unisono.transports.links.socket_passing import share_memory, take_shared_memory
from unisono.transports.links.tagged_fabrics import Fabrics, Proposal
from unisono.transports.links.tls import connection_of

# In the field `lane` of its HELLO, a TCP channel also carries the number of the stream and how many streams it has.
_LANE_MASK = 0xFFFF
_STREAM_SHIFT = 16
_STREAM_MASK = 0xFF
_STREAMS_SHIFT = 24
# On the wire, lane 0 is for point-to-point messages, and lane k + 1 is lane k of collectives.
_WIRE_POINT_TO_POINT = 0


class OpenerContext(NamedTuple):
    """The parts of a session that openers use.

    Attributes:
        loop: the event loop of the listener.
        epoch: the generation of the job's membership.
        options: the options of the transports.
        fabrics: the message libraries that this rank can use.
        why_apart: returns the reason why a rank shares no memory with this one; empty if it does.
    """

    loop: EventLoop
    epoch: int
    options: Options
    fabrics: Fabrics
    why_apart: Callable[[int], str]


class Opener(Protocol):
    """Opens the channels of one transport. It owns the sockets that it gets, and closes them on errors."""

    def obstacle(self, peer: int) -> str:
        """Return the reason why this transport cannot reach a rank, as text; an empty text if it may reach the rank."""

    def wire_lanes(self, lane: int) -> list[int]:
        """Return the field `lane` of the HELLOs of a channel: one for each socket that it needs."""

    def dialled(self, key: ChannelKey, sockets: list[socket.socket], done: Done) -> None:
        """Open a channel over the sockets that this rank has dialled."""

    def accepted(self, key: ChannelKey, hello: Hello, sock: socket.socket, done: Done) -> None:
        """Open a channel over a socket that another rank has dialled."""

    def close(self, endpoint: _core.Endpoint | None = None) -> None:
        """Close the sockets of unfinished channels, of one endpoint or of all."""


class _SharedMemory:
    """Opens shared-memory channels. The dialler creates memory and two doorbells, and passes them over the socket."""

    def __init__(self, context: OpenerContext) -> None:
        self._why_apart = context.why_apart
        self._pending = PendingSockets(context.loop)

    def obstacle(self, peer: int) -> str:
        reason = self._why_apart(peer)
        return f"shared memory does not ({reason})" if reason else ""

    def wire_lanes(self, lane: int) -> list[int]:
        return [wire_lane(lane)]

    def dialled(self, key: ChannelKey, sockets: list[socket.socket], done: Done) -> None:
        (sock,) = sockets
        memory, bell, peer_bell = share_memory(sock)
        key.endpoint.add_shm(key.lane, key.peer, True, memory, bell, peer_bell, sock.detach())
        done(None)

    def accepted(self, key: ChannelKey, hello: Hello, sock: socket.socket, done: Done) -> None:
        def take() -> bool:
            self._pending.end(sock)
            memory, peer_bell, bell = take_shared_memory(sock)
            key.endpoint.add_shm(key.lane, key.peer, False, memory, bell, peer_bell, sock.detach())
            return True

        self._pending.await_bytes(key.endpoint, sock, take, done)

    def close(self, endpoint: _core.Endpoint | None = None) -> None:
        self._pending.close(endpoint)


class _Tcp:
    """Opens TCP channels, which have one socket for each stream."""

    def __init__(self, context: OpenerContext) -> None:
        self._epoch, self._options = context.epoch, context.options
        self._gathered: dict[ChannelKey, dict[int, socket.socket]] = {}  # of channels that lack streams yet

    def obstacle(self, peer: int) -> str:
        return ""

    def wire_lanes(self, lane: int) -> list[int]:
        streams = self._options.tcp_streams
        return [wire_lane(lane, stream) | streams << _STREAMS_SHIFT for stream in range(streams)]

    def dialled(self, key: ChannelKey, sockets: list[socket.socket], done: Done) -> None:
        connections = [connection_of(sock) for sock in sockets]
        key.endpoint.add_tcp(key.lane, key.peer, connections, self._epoch, self._options.tcp_checksum)
        done(None)

    def accepted(self, key: ChannelKey, hello: Hello, sock: socket.socket, done: Done) -> None:
        stream, streams = stream_of(hello), hello.lane >> _STREAMS_SHIFT
        if not stream < streams <= MOST_TCP_STREAMS:
            raise OSError(f"stream {stream} of {streams} is invalid: a channel has at most {MOST_TCP_STREAMS}")
        gathered = self._gathered.setdefault(key, {})
        if stream in gathered:
            raise OSError(f"stream {stream} of a channel was dialled twice")
        gathered[stream] = sock
        if len(gathered) == streams:
            del self._gathered[key]
            self.dialled(key, [gathered[number] for number in sorted(gathered)], done)

    def close(self, endpoint: _core.Endpoint | None = None) -> None:
        for key in [key for key in self._gathered if endpoint in (None, key.endpoint)]:
            for sock in self._gathered.pop(key).values():
                sock.close()


class _Fabric:
    """Opens channels over a message library: two ranks agree on addresses and tags over a socket, which stays open."""

    def __init__(self, context: OpenerContext, name: str) -> None:
        self._fabrics, self._name = context.fabrics, name
        self._pending = PendingSockets(context.loop)

    def obstacle(self, peer: int) -> str:
        return self._fabrics.obstacle(self._name)

    def wire_lanes(self, lane: int) -> list[int]:
        return [wire_lane(lane)]

    def dialled(self, key: ChannelKey, sockets: list[socket.socket], done: Done) -> None:
        (sock,) = sockets
        ours = self._fabrics.propose(self._name)
        sock.sendall(ours.pack())
        self._await_proposal(key, sock, lambda _: ours, done)

    def accepted(self, key: ChannelKey, hello: Hello, sock: socket.socket, done: Done) -> None:
        def answered(theirs: Proposal) -> Proposal:
            ours = self._fabrics.propose(self._name, theirs)
            sock.sendall(ours.pack())
            return ours

        self._await_proposal(key, sock, answered, done)

    def close(self, endpoint: _core.Endpoint | None = None) -> None:
        self._pending.close(endpoint)

    def _await_proposal(
        self, key: ChannelKey, sock: socket.socket, ours: Callable[[Proposal], Proposal], done: Done
    ) -> None:
        """Open the channel once the proposal of the other rank has arrived, if both ranks can use the library."""
        received = bytearray()

        def take() -> bool:
            theirs = Proposal.received(sock, received)
            if theirs is None:
                return False
            self._pending.end(sock)
            self._add(key, sock, ours(theirs), theirs)
            return True

        self._pending.await_bytes(key.endpoint, sock, take, done)

    def _add(self, key: ChannelKey, sock: socket.socket, ours: Proposal, theirs: Proposal) -> None:
        for proposal in (ours, theirs):
            proposal.check()
        messenger = self._fabrics.messenger(self._name)
        key.endpoint.add_tagged(key.lane, key.peer, messenger, theirs.address, theirs.tag, ours.tag, sock.detach())


class ChannelKind(NamedTuple):
    """One transport of the native core: its opener, and the facts that the session needs.

    Attributes:
        make_opener: makes the opener of a session.
        is_authenticated: whether only the two ranks, which have proved that they hold the key, can send on a channel.
        is_shared_memory: whether channels are shared memory, which both ranks must be able to map.
        reaches_all: whether it reaches every rank.
        dials_tcp: whether it needs TCP sockets, also between ranks of one host.
        advice: what an error recommends if a channel cannot be opened, with {} for the setting `transports`; or empty.
    """

    make_opener: Callable[[OpenerContext], Opener]
    is_authenticated: bool = True
    is_shared_memory: bool = False
    reaches_all: bool = False
    dials_tcp: bool = False
    advice: str = ""


CHANNELS: Mapping[str, ChannelKind] = {
    "shm": ChannelKind(
        _SharedMemory, is_shared_memory=True, advice="; tcp alone does without shared memory: set {} to tcp"
    ),
    "tcp": ChannelKind(_Tcp, reaches_all=True, dials_tcp=True),
    "ucx": ChannelKind(partial(_Fabric, name="ucx"), is_authenticated=False),
    "mpi": ChannelKind(partial(_Fabric, name="mpi"), is_authenticated=False),
}
"""The transports of the native core, by the names in the option `transports`."""

AUTHENTICATED = tuple(name for name, kind in CHANNELS.items() if kind.is_authenticated)
UNAUTHENTICATED = tuple(name for name, kind in CHANNELS.items() if not kind.is_authenticated)
SHARED_MEMORY = tuple(name for name, kind in CHANNELS.items() if kind.is_shared_memory)
REACHING_ALL = tuple(name for name, kind in CHANNELS.items() if kind.reaches_all)


def transport_of(purpose: Purpose) -> str:
    """Return the name of the transport whose channels a connection of this purpose opens."""
    return purpose.name.lower()


def purpose_of(transport: str) -> Purpose:
    """Return the purpose of connections that open channels of a transport."""
    return Purpose[transport.upper()]


def dials_tcp(purpose: Purpose) -> bool:
    """Return whether a connection must be TCP, also between ranks of one host."""
    kind = CHANNELS.get(transport_of(purpose))
    return purpose is Purpose.TCP_RESUME or (kind is not None and kind.dials_tcp)


def lane_of(hello: Hello) -> int:
    """Return the lane of a channel on the dialled rank."""
    wire_lane = hello.lane & _LANE_MASK
    return _core.RECEIVING_LANE if wire_lane == _WIRE_POINT_TO_POINT else wire_lane - 1


def lane_name(lane: int) -> str:
    """Return a lane in words, for the log."""
    return f"of lane {lane}" if lane >= 0 else "for messages"


def wire_lane(lane: int, stream: int = 0) -> int:
    """Return the field `lane` of a HELLO for a lane and a stream of a channel."""
    return (_WIRE_POINT_TO_POINT if lane < 0 else lane + 1) | stream << _STREAM_SHIFT


def stream_of(hello: Hello) -> int:
    """Return the number of the stream in the field `lane` of a HELLO."""
    return hello.lane >> _STREAM_SHIFT & _STREAM_MASK


def must_dial(rank: int, lane: int, peer: int) -> bool:
    """Return whether `rank`, and not `peer`, dials the channel of a lane between them."""
    return lane == _core.SENDING_LANE or (lane >= 0 and peer < rank)
