"""Opens the channels of the transport `shm`."""

from __future__ import annotations

import socket

from unisono.transports import _core
from unisono.transports.links.handshake import Hello
from unisono.transports.links.opener import OpenerContext
from unisono.transports.links.pending_sockets import ChannelKey, Done, PendingSockets
from unisono.transports.links.wire_lanes import wire_lane
from unisono.transports.shm.socket_passing import share_memory, take_shared_memory


class SharedMemoryOpener:
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
