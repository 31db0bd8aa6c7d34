"""`PendingSockets`: sockets on which a channel waits for bytes of the other rank before it can be used."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import NamedTuple

from unisono.errors import UnisonoError
from unisono.transports import _core
from unisono.transports.links.event_loop import EventLoop

Done = Callable[[Exception | None], None]
"""Called once: with None if the channel is open, otherwise with the error. A FabricError is a refusal of the peer."""


class ChannelKey(NamedTuple):
    """The name of a channel: the endpoint of its communicator, its lane, and the peer's number in the job."""

    endpoint: _core.Endpoint
    lane: int
    peer: int


class PendingSockets:
    """The sockets of channels that wait for bytes of the other rank. All methods are called in the thread of `loop`."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._owners: dict[socket.socket, object] = {}

    def await_bytes(self, owner: object, sock: socket.socket, take: Callable[[], bool], done: Done) -> None:
        """Call `take` whenever the socket can be read, until it returns True. If it raises, the socket is closed.

        `owner` is the endpoint, or another object, for which the socket can be closed by `close`.
        """
        self._owners[sock] = owner

        def on_readable() -> None:
            if sock not in self._owners:  # closed by an earlier callback of the same wake-up
                return
            try:
                if not take():
                    return
            except BlockingIOError:  # part of a record of TLS has arrived
                return
            except (OSError, RuntimeError, UnisonoError) as error:
                self._forget(sock)
                sock.close()
                done(error)
            else:
                done(None)

        self._loop.watch(sock, on_readable)

    def end(self, sock: socket.socket) -> None:
        """Stop watching the socket, which stays open."""
        self._forget(sock)

    def close(self, owner: object | None) -> None:
        """Close the sockets of an owner, or of all."""
        for sock in [sock for sock, other in self._owners.items() if owner in (None, other)]:
            self._forget(sock)
            sock.close()

    def _forget(self, sock: socket.socket) -> None:
        if self._owners.pop(sock, None) is not None:
            self._loop.unwatch(sock)
