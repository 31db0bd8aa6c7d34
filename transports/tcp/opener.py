"""Opens the channels of the transport `tcp`."""

from __future__ import annotations

import socket

from unisono.options import MOST_TCP_STREAMS
from unisono.transports import _core
from unisono.transports.links.handshake import Hello
from unisono.transports.links.opener import OpenerContext
from unisono.transports.links.pending_sockets import ChannelKey, Done
from unisono.transports.tcp.streams import stream_of, streams_of, wire_stream
from unisono.transports.tcp.tls import connection_of


class TcpOpener:
    """Opens TCP channels, which have one socket for each stream."""

    def __init__(self, context: OpenerContext) -> None:
        self._epoch, self._options = context.epoch, context.options
        self._streams = context.options.tcp_streams
        self._gathered: dict[ChannelKey, dict[int, socket.socket]] = {}  # of channels that lack streams yet

    def obstacle(self, peer: int) -> str:
        return ""

    def wire_lanes(self, lane: int) -> list[int]:
        return [wire_stream(lane, stream, self._streams) for stream in range(self._streams)]

    def use_streams(self, streams: int) -> None:
        """Dial `streams` streams for each channel from now on. The accepting rank takes as many as are dialled."""
        self._streams = streams

    def dialled(self, key: ChannelKey, sockets: list[socket.socket], done: Done) -> None:
        connections = [connection_of(sock) for sock in sockets]
        key.endpoint.add_tcp(key.lane, key.peer, connections, self._epoch, self._options.tcp_checksum)
        done(None)

    def accepted(self, key: ChannelKey, hello: Hello, sock: socket.socket, done: Done) -> None:
        stream, streams = stream_of(hello), streams_of(hello)
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
