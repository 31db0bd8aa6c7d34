"""Opens the channels of the transports `ucx` and `mpi`."""

from __future__ import annotations

import socket
from collections.abc import Callable

from unisono.transports import _core
from unisono.transports.links.handshake import Hello
from unisono.transports.links.opener import OpenerContext
from unisono.transports.links.pending_sockets import ChannelKey, Done, PendingSockets
from unisono.transports.links.wire_lanes import wire_lane
from unisono.transports.tagged.fabrics import Proposal


class FabricOpener:
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
