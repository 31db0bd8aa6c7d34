"""`Channels`: opens the channels of all communicators of a session, and accepts those that other ranks dial.

Theory of operation. A channel is opened when a call first needs it. If a collective connects two ranks, the higher one
dials. Point-to-point messages have a channel for each direction, which the sender dials. The event loop of the listener
dials, so no call waits for the other rank to answer. The call waits for its channel as it waits for a message: until
its deadline, an abort, or the death of a rank.

Each transport has an opener (channel_kinds.py), which opens its channels over the dialled sockets. One socket of each
channel stays open, because its end shows that the other side has gone.
"""

from __future__ import annotations

import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from unisono.errors import PeerLostError, TransportUnavailableError, UnisonoError
from unisono.foundation import log
from unisono.options import Options
from unisono.transports import _core
from unisono.transports.contracts.call import MemoryType
from unisono.transports.host.system_limits import is_exhausted, unavailable
from unisono.transports.links.channel_kinds import (
    AUTHENTICATED,
    CHANNELS,
    REACHING_ALL,
    SHARED_MEMORY,
    UNAUTHENTICATED,
    purpose_of,
    transport_of,
)
from unisono.transports.links.dialer import Dialer, Target
from unisono.transports.links.event_loop import EventLoop
from unisono.transports.links.handshake import Hello, Purpose
from unisono.transports.links.opener import Opener, OpenerContext
from unisono.transports.links.pending_sockets import ChannelKey
from unisono.transports.links.wire_lanes import lane_name, lane_on_dialled_rank, must_dial
from unisono.transports.tagged.fabrics import FabricError, Fabrics
from unisono.transports.tcp.opener import TcpOpener

_log = log.get("links")

# So many closed communicators are remembered. No rank dials a channel of an older one any more.
_MOST_CLOSED = 1024


class ChannelHooks(NamedTuple):
    """The functions of the session that `Channels` calls.

    Attributes:
        is_local: returns whether a peer shares memory with this rank.
        why_apart: returns the reason why a peer does not.
        target: (peer, purpose, communicator, lane) → the target to dial.
        fail: fails the job with an error that concerns a peer.
    """

    is_local: Callable[[int], bool]
    why_apart: Callable[[int], str]
    target: Callable[[int, Purpose, int, int], Target]
    fail: Callable[[int, Exception], None]


class Channels:
    """The channels of a session. `start` must precede all other methods but `admit`.

    Args:
        rank: this rank.
        epoch: the generation of the job's membership.
        loop: the event loop of the listener.
        dialer: connects to other ranks.
        hooks: the functions of the session.
    """

    def __init__(self, rank: int, epoch: int, loop: EventLoop, dialer: Dialer, hooks: ChannelHooks) -> None:
        self._rank = rank
        self._epoch = epoch
        self._loop = loop
        self._dialer = dialer
        self._hooks = hooks
        self._options = Options()
        self._fabrics = Fabrics((), rank, None)
        self._openers: dict[str, Opener] = {}
        self._lock = threading.Lock()
        self._endpoints: dict[int, _core.Endpoint] = {}
        self._early: list[tuple[Hello, socket.socket]] = []  # their communicator does not exist here yet
        self._opened: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)  # lanes and peers, by communicator
        self._authenticated: set[int] = set()  # communicators that must not use a message library
        # The latest closed communicators, in order. Ranks that have not closed them may still dial channels.
        self._closed: dict[int, None] = {}
        self._used: dict[int, str] = {}  # by peer, the transport of its latest channel

    def start(self, options: Options, fabrics: Fabrics) -> None:
        """Create the opener of each transport.

        Args:
            options: `transports`, and the options of TCP.
            fabrics: the message libraries that this rank can use.
        """
        self._options, self._fabrics = options, fabrics
        context = OpenerContext(self._loop, self._epoch, options, fabrics, self._why_no_memory)
        with self._lock:
            self._openers = {name: kind.make_opener(context) for name, kind in CHANNELS.items()}

    @property
    def tcp(self) -> TcpOpener:
        """The opener of the channels over TCP."""
        opener = self._openers["tcp"]
        assert isinstance(opener, TcpOpener)
        return opener

    def add_communicator(self, communicator: int, endpoint: _core.Endpoint, *, is_authenticated: bool = False) -> None:
        """Accept channels of `communicator` from other ranks, including channels that were dialled before.

        With `is_authenticated`, the communicator uses only transports on which nobody else can send.
        """
        with self._lock:
            self._endpoints[communicator] = endpoint
            if is_authenticated:
                self._authenticated.add(communicator)
            early, self._early = self._early, []
        for hello, sock in early:
            self._loop.submit(partial(self._admit_early, hello, sock))

    def _admit_early(self, hello: Hello, sock: socket.socket) -> None:
        try:
            self.admit(hello, sock)
        except (OSError, RuntimeError) as error:
            self.refuse(hello, sock, error)

    def remove_communicator(self, communicator: int) -> None:
        """Refuse channels of `communicator` from now on."""
        with self._lock:
            self._closed[communicator] = None
            if len(self._closed) > _MOST_CLOSED:
                del self._closed[next(iter(self._closed))]
            self._authenticated.discard(communicator)
            endpoint = self._endpoints.pop(communicator, None)
            self._opened.pop(communicator, None)
        if endpoint is not None:
            self._loop.submit(partial(self.close_openers, endpoint))

    def close_openers(self, endpoint: _core.Endpoint | None = None) -> None:
        """Close the sockets of unfinished channels, of one endpoint or of all. Called in the loop's thread."""
        for opener in self._openers.values():
            opener.close(endpoint)

    def endpoint(self, communicator: int) -> _core.Endpoint | None:
        """Return the endpoint of an open communicator."""
        with self._lock:
            return self._endpoints.get(communicator)

    def close(self) -> None:
        """Drop all endpoints, and close the connections whose communicator this rank has not made yet."""
        with self._lock:
            self._endpoints.clear()
            early, self._early = self._early, []
        for _, sock in early:
            sock.close()

    @property
    def is_authenticated(self) -> bool:
        """Whether no transport of the job is a message library, as these do not check who sends."""
        return not any(name in UNAUTHENTICATED for name in self._options.preference)

    @property
    def preference(self) -> str:
        """The names of the transports, in order of preference."""
        return ",".join(self._options.preference)

    def link_to(self, peer: int) -> str:
        """Return the transport to `peer`, and why it is not shared memory, such as "tcp (another machine)".

        If the transport carries GPU memory, the result says so: "ucx with cuda (another machine)".
        """
        transport = self._transport_to(peer)
        if transport in SHARED_MEMORY:
            return transport
        with_cuda = " with cuda" if self._fabrics.carries(transport, MemoryType.CUDA) else ""
        return f"{transport}{with_cuda} ({'asked for' if self._hooks.is_local(peer) else self._hooks.why_apart(peer)})"

    def carries(self, memory: MemoryType, peer: int) -> bool:
        """Return whether the transport to `peer` carries `memory`."""
        return self._fabrics.carries(self._transport_to(peer), memory)

    def _transport_to(self, peer: int) -> str:
        """Return the transport of the latest channel to `peer`; before one is open, the first that may reach it."""
        possible = (name for name in self._options.preference if not self._openers[name].obstacle(peer))
        return self._used.get(peer) or next(possible, "none")

    def shares_memory(self, ranks: Iterable[int]) -> bool:
        """Return whether these ranks exchange messages through shared memory."""
        return self._options.preference[0] in SHARED_MEMORY and all(self._hooks.is_local(rank) for rank in ranks)

    def open(self, communicator: int, channels: Iterable[tuple[int, int]]) -> None:
        """Begin to open those of the (lane, peer) channels that this rank must dial and has not begun to open.

        The job fails if a channel cannot be opened.
        """
        opened = self._opened[communicator]
        for lane, peer in channels:
            if must_dial(self._rank, lane, peer) and (lane, peer) not in opened:
                opened.add((lane, peer))
                transports = AUTHENTICATED if communicator in self._authenticated else self._options.preference
                opening = _Opening(communicator, lane, peer, list(transports))
                self._loop.submit(partial(self._open_by_next, opening))

    def admit(self, hello: Hello, sock: socket.socket) -> None:
        """Accept a channel that another rank has dialled. Called in the loop's thread, because openers run there.

        Raises:
            OSError, RuntimeError: the channel cannot be opened.
        """
        with self._lock:
            if hello.communicator in self._closed:
                sock.close()  # the other rank sees that this one has left the communicator
                return
            endpoint = self._endpoints.get(hello.communicator)
            if endpoint is None:
                self._early.append((hello, sock))
                return
        opener = self._openers[transport_of(hello.purpose)]
        channel = ChannelKey(endpoint, lane_on_dialled_rank(hello), hello.sender)
        opener.accepted(channel, hello, sock, partial(self._on_accepted, hello, sock))

    def _why_no_memory(self, peer: int) -> str:
        return "" if self._hooks.is_local(peer) else self._hooks.why_apart(peer)

    def _note_used(self, communicator: int, peer: int, transport: str) -> None:
        """Record the transport of the latest channel to a peer.

        Channels of pickled objects do not count: they may use another one.
        """
        if communicator not in self._authenticated:
            self._used[peer] = transport

    def _open_by_next(self, opening: _Opening) -> None:
        """Open a channel by the next transport that may reach the peer. Called in the loop's thread."""
        while opening.transports:
            opening.transport = opening.transports.pop(0)
            opener = self._openers[opening.transport]
            obstacle = opener.obstacle(opening.peer)
            if not obstacle:
                self._dial_sockets(opening, opener)
                return
            self._note_obstacle(opening, obstacle)
        if not set(REACHING_ALL) & set(self._options.preference):
            opening.obstacles.append(f"{' or '.join(REACHING_ALL)}, if it is among the transports, reaches every rank")
        setting = self._options.source_of("transports")
        message = f"no transport of {setting} = {self.preference} reaches rank {opening.peer}: "
        self._hooks.fail(opening.peer, TransportUnavailableError(message + "; ".join(opening.obstacles)))

    def _note_obstacle(self, opening: _Opening, obstacle: str) -> None:
        _log.debug("channel %s to rank %d: not %s: %s", *opening.shown(), opening.transport, obstacle)
        opening.obstacles.append(obstacle)

    def _dial_sockets(self, opening: _Opening, opener: Opener) -> None:
        lanes = opener.wire_lanes(opening.lane)
        opening.sockets = dict.fromkeys(lanes)
        for lane in lanes:
            target = self._hooks.target(opening.peer, purpose_of(opening.transport), opening.communicator, lane)
            self._dialer.dial(target, partial(self._on_dialled, opening, lane), partial(self._on_opened, opening))

    def _on_dialled(self, opening: _Opening, lane: int, sock: socket.socket) -> None:
        opening.sockets[lane] = sock
        sockets = [sock for sock in opening.sockets.values() if sock is not None]
        if len(sockets) < len(opening.sockets):
            return
        endpoint = self.endpoint(opening.communicator)
        if endpoint is None:  # the communicator was closed meanwhile
            opening.close()
            return
        channel = ChannelKey(endpoint, opening.lane, opening.peer)
        try:
            self._openers[opening.transport].dialled(channel, sockets, partial(self._on_opened, opening))
        except (OSError, RuntimeError, UnisonoError) as error:
            self._on_opened(opening, error)

    def _on_opened(self, opening: _Opening, error: Exception | None) -> None:
        """Record that a channel is open; on an error, try the next transport or fail the job."""
        if error is None:
            self._note_used(opening.communicator, opening.peer, opening.transport)
            _log.debug("channel %s to rank %d: %s", *opening.shown(), self.link_to(opening.peer))
            return
        opening.close()
        if isinstance(error, FabricError):
            self._note_obstacle(opening, error.message)
            self._open_by_next(opening)
        elif isinstance(error, ConnectionError):
            self._hooks.fail(opening.peer, PeerLostError(f"rank {opening.peer} is gone: {error}"))
        elif isinstance(error, UnisonoError):
            self._hooks.fail(opening.peer, error)
        elif is_exhausted(error):  # another transport would need as many descriptors
            self._hooks.fail(opening.peer, self._refused(f"a channel to rank {opening.peer}", error, opening.peer))
        else:
            message = f"a channel over {opening.transport} to rank {opening.peer} cannot be opened: {error}"
            advice = CHANNELS[opening.transport].advice.format(self._options.source_of("transports"))
            self._hooks.fail(opening.peer, TransportUnavailableError(message + advice))

    def _on_accepted(self, hello: Hello, sock: socket.socket, error: Exception | None) -> None:
        """Record that a channel that another rank has dialled is open, or has failed on this side."""
        if error is not None:
            self.refuse(hello, sock, error)
            return
        transport = transport_of(hello.purpose)
        self._note_used(hello.communicator, hello.sender, transport)
        _log.debug("channel %s from rank %d: %s", lane_name(lane_on_dialled_rank(hello)), hello.sender, transport)

    def refuse(self, hello: Hello, sock: socket.socket, error: Exception) -> None:
        """Close a connection of another rank that cannot be used because of `error`.

        If the other rank has closed the connection, it has left the communicator, which is no fault. If a call still
        needs that rank, the call learns of its departure over the control links.
        """
        peer = hello.sender
        if is_exhausted(error):  # the other rank cannot know that, so this rank reports it
            self._hooks.fail(peer, self._refused(f"a channel from rank {peer}", error, peer))
        sock.close()
        show = _log.debug if isinstance(error, ConnectionError) else _log.warning
        show("channel from rank %d: it cannot be opened: %s", peer, error)

    def _refused(self, channel: str, error: Exception, peer: int) -> TransportUnavailableError:
        rank = self._rank
        return unavailable(f"{channel} cannot be opened on rank {rank}", error, rank, peer)


class _Opening:
    """A channel that this rank is opening.

    Attributes:
        communicator, lane, peer: the name of the channel.
        transports: the transports that have not been tried yet.
        transport: the transport that is being tried.
        sockets: the dialled sockets, by their lanes on the wire.
        obstacles: the reasons why other transports could not be used.
    """

    def __init__(self, communicator: int, lane: int, peer: int, transports: list[str]) -> None:
        self.communicator, self.lane, self.peer, self.transports = communicator, lane, peer, transports
        self.transport = ""
        self.sockets: dict[int, socket.socket | None] = {}
        self.obstacles: list[str] = []

    def shown(self) -> tuple[str, int]:
        """Return the lane in words and the peer, for the log."""
        return lane_name(self.lane), self.peer

    def close(self) -> None:
        """Close the sockets."""
        for sock in self.sockets.values():
            if sock is not None:
                sock.close()
        self.sockets = {}
