"""How channels of each transport are opened, by the rank that dials and by the rank that is dialled.

`OPENERS` has a class for each transport: a new transport of the native core is a row there. The session dials as many
authenticated sockets as an opener asks for, and hands them over. At the other end, the session hands over each socket
as it arrives. Everything here runs in the event loop of the listener and never waits: an opener reads the words of the
other rank when they have come.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

from unisono.errors import UnisonoError
from unisono.options import MOST_TCP_STREAMS, Options
from unisono.transports import _core
from unisono.transports.links.event_loop import EventLoop
from unisono.transports.links.handshake import Hello
from unisono.transports.links.socket_passing import share_memory, take_shared_memory
from unisono.transports.links.tagged_fabrics import Fabrics, Proposal

# Above the lane, the hello of a channel over TCP says which of how many streams it opens.
_LANE_MASK = 0xFFFF
_STREAM_SHIFT = 16
_STREAM_MASK = 0xFF
_STREAMS_SHIFT = 24
# On the wire, lane 0 is that of point-to-point messages, and lane k + 1 is lane k of collectives.
_WIRE_POINT_TO_POINT = 0

Done = Callable[[Exception | None], None]
"""Called once: with None when the channel is open, with a FabricError if the other rank refuses, or another error."""


class Place(NamedTuple):
    """Where a channel belongs: the endpoint of a communicator, the lane there, and the peer, a rank of the job."""

    endpoint: _core.Endpoint
    lane: int
    peer: int


class OpenerContext(NamedTuple):
    """What openers use of a session.

    Attributes:
        loop: the event loop of the listener.
        epoch: the generation of the job's membership.
        options: of the use of transports.
        fabrics: the libraries of messages that this rank can use.
        why_apart: returns why a rank is not on this host; empty if it is.
    """

    loop: EventLoop
    epoch: int
    options: Options
    fabrics: Fabrics
    why_apart: Callable[[int], str]


class Opener(Protocol):
    """How channels of one transport are opened. It takes over the sockets, and closes them on errors."""

    def obstacle(self, peer: int) -> str:
        """Return why this transport does not reach a rank; empty if it may."""

    def wire_lanes(self, lane: int) -> list[int]:
        """Return what the hellos of a channel say as their lanes: one for each socket that it needs."""

    def dialled(self, place: Place, sockets: list[socket.socket], done: Done) -> None:
        """Open the channel over sockets that have been dialled."""

    def accepted(self, place: Place, hello: Hello, sock: socket.socket, done: Done) -> None:
        """Open the channel that another rank has dialled."""

    def close(self, endpoint: _core.Endpoint | None = None) -> None:
        """Close the sockets of channels that are not open yet, of one endpoint or of all."""


class _Pending:
    """Sockets of channels on which the other rank has yet to say something."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._endpoints: dict[socket.socket, _core.Endpoint] = {}

    def await_bytes(self, place: Place, sock: socket.socket, take: Callable[[], bool], done: Done) -> None:
        """Call `take` whenever the socket can be read, until it returns True; an error of it ends the channel."""
        self._endpoints[sock] = place.endpoint

        def on_readable() -> None:
            if sock not in self._endpoints:  # closed by an earlier callback of the same wake-up
                return
            try:
                if not take():
                    return
            except (OSError, RuntimeError, UnisonoError) as error:
                self._forget(sock)
                sock.close()
                done(error)
            else:
                done(None)

        self._loop.watch(sock, on_readable)

    def end(self, sock: socket.socket) -> None:
        """Watch the socket no more; it stays open."""
        self._forget(sock)

    def close(self, endpoint: _core.Endpoint | None) -> None:
        for sock in [sock for sock, its in self._endpoints.items() if endpoint in (None, its)]:
            self._forget(sock)
            sock.close()

    def _forget(self, sock: socket.socket) -> None:
        if self._endpoints.pop(sock, None) is not None:
            self._loop.unwatch(sock)


class _SharedMemory:
    """Memory and a doorbell for each side, which the dialling side makes and passes over the Unix socket."""

    def __init__(self, context: OpenerContext) -> None:
        self._why_apart = context.why_apart
        self._pending = _Pending(context.loop)

    def obstacle(self, peer: int) -> str:
        reason = self._why_apart(peer)
        return f"shared memory does not ({reason})" if reason else ""

    def wire_lanes(self, lane: int) -> list[int]:
        return [_wire_lane(lane)]

    def dialled(self, place: Place, sockets: list[socket.socket], done: Done) -> None:
        (sock,) = sockets
        memory, bell, peer_bell = share_memory(sock)
        place.endpoint.add_shm(place.lane, place.peer, True, memory, bell, peer_bell, sock.detach())
        done(None)

    def accepted(self, place: Place, hello: Hello, sock: socket.socket, done: Done) -> None:
        def take() -> bool:
            self._pending.end(sock)
            memory, peer_bell, bell = take_shared_memory(sock)
            place.endpoint.add_shm(place.lane, place.peer, False, memory, bell, peer_bell, sock.detach())
            return True

        self._pending.await_bytes(place, sock, take, done)

    def close(self, endpoint: _core.Endpoint | None = None) -> None:
        self._pending.close(endpoint)


class _Tcp:
    """One socket for each stream."""

    def __init__(self, context: OpenerContext) -> None:
        self._epoch, self._options = context.epoch, context.options
        self._gathered: dict[Place, dict[int, socket.socket]] = {}  # of channels that lack streams yet

    def obstacle(self, peer: int) -> str:
        return ""

    def wire_lanes(self, lane: int) -> list[int]:
        streams = self._options.tcp_streams
        return [_wire_lane(lane) | stream << _STREAM_SHIFT | streams << _STREAMS_SHIFT for stream in range(streams)]

    def dialled(self, place: Place, sockets: list[socket.socket], done: Done) -> None:
        descriptors = [sock.detach() for sock in sockets]
        place.endpoint.add_tcp(place.lane, place.peer, descriptors, self._epoch, self._options.tcp_checksum)
        done(None)

    def accepted(self, place: Place, hello: Hello, sock: socket.socket, done: Done) -> None:
        stream, streams = hello.lane >> _STREAM_SHIFT & _STREAM_MASK, hello.lane >> _STREAMS_SHIFT
        if not stream < streams <= MOST_TCP_STREAMS:
            raise OSError(f"stream {stream} of {streams} of a channel cannot be")
        gathered = self._gathered.setdefault(place, {})
        if stream in gathered:
            raise OSError(f"stream {stream} of a channel has come twice")
        gathered[stream] = sock
        if len(gathered) == streams:
            del self._gathered[place]
            self.dialled(place, [gathered[number] for number in sorted(gathered)], done)

    def close(self, endpoint: _core.Endpoint | None = None) -> None:
        for place in [place for place in self._gathered if endpoint in (None, place.endpoint)]:
            for sock in self._gathered.pop(place).values():
                sock.close()


class _Fabric:
    """A library of tagged messages: two ranks agree on addresses and tags over the socket, which then stays open."""

    def __init__(self, context: OpenerContext, name: str) -> None:
        self._fabrics, self._name = context.fabrics, name
        self._pending = _Pending(context.loop)

    def obstacle(self, peer: int) -> str:
        return self._fabrics.obstacle(self._name)

    def wire_lanes(self, lane: int) -> list[int]:
        return [_wire_lane(lane)]

    def dialled(self, place: Place, sockets: list[socket.socket], done: Done) -> None:
        (sock,) = sockets
        ours = self._fabrics.propose(self._name)
        sock.sendall(ours.pack())
        self._await_proposal(place, sock, lambda _: ours, done)

    def accepted(self, place: Place, hello: Hello, sock: socket.socket, done: Done) -> None:
        def answered(theirs: Proposal) -> Proposal:
            ours = self._fabrics.propose(self._name, theirs)
            sock.sendall(ours.pack())
            return ours

        self._await_proposal(place, sock, answered, done)

    def close(self, endpoint: _core.Endpoint | None = None) -> None:
        self._pending.close(endpoint)

    def _await_proposal(
        self, place: Place, sock: socket.socket, ours: Callable[[Proposal], Proposal], done: Done
    ) -> None:
        """Open the channel, once the other rank has said how it is reached, if both can."""
        received = bytearray()

        def take() -> bool:
            theirs = Proposal.received(sock, received)
            if theirs is None:
                return False
            self._pending.end(sock)
            self._add(place, sock, ours(theirs), theirs)
            return True

        self._pending.await_bytes(place, sock, take, done)

    def _add(self, place: Place, sock: socket.socket, ours: Proposal, theirs: Proposal) -> None:
        for proposal in (ours, theirs):
            proposal.check()
        messenger = self._fabrics.messenger(self._name)
        place.endpoint.add_tagged(
            place.lane, place.peer, messenger, theirs.address, theirs.tag, ours.tag, sock.detach()
        )


OPENERS: Mapping[str, Callable[[OpenerContext], Opener]] = {
    "shm": _SharedMemory,
    "tcp": _Tcp,
    "ucx": partial(_Fabric, name="ucx"),
    "mpi": partial(_Fabric, name="mpi"),
}


def lane_of(hello: Hello) -> int:
    """Return the lane that a channel has for the rank that was dialled."""
    wire_lane = hello.lane & _LANE_MASK
    return _core.RECEIVING_LANE if wire_lane == _WIRE_POINT_TO_POINT else wire_lane - 1


def lane_name(lane: int) -> str:
    """Return a lane as the log shows it."""
    return f"of lane {lane}" if lane >= 0 else "for messages"


def _wire_lane(lane: int) -> int:
    return _WIRE_POINT_TO_POINT if lane == _core.SENDING_LANE else lane + 1
