"""The contract of the openers, which open the channels of one transport each.

The session dials as many authenticated sockets as the opener needs, and hands them to it. On the dialled rank, the
session hands each socket to the opener when it arrives. Openers run in the event loop of the listener and never wait:
they read what the other rank sends when it has arrived.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import NamedTuple, Protocol

from unisono.options import Options
from unisono.transports import _core
from unisono.transports.links.event_loop import EventLoop
from unisono.transports.links.handshake import Hello
from unisono.transports.links.pending_sockets import ChannelKey, Done
from unisono.transports.tagged.fabrics import Fabrics


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
