"""An example of a complete transport: messages over stream sockets between the processes of one machine.

docs/writing-transports.md explains it. A package offers it to Unisono by an entry point:

    [project.entry-points."unisono.transports"]
    sockets = "socket_transport:open_sockets"

A program uses it by ``un.Options(transports="sockets")`` or ``UNISONO_TRANSPORTS=sockets``.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable, Sequence

from unisono.transports import Bootstrap, FramedTransport

TOKEN_NBYTES = 16
LENGTH, RANK = struct.Struct("!Q"), struct.Struct("!I")
MOST_NBYTES = 1 << 40


class Sent:
    """A frame that is being sent: the parts that the socket has not taken yet."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self.parts = deque(parts)

    def done(self) -> bool:
        return not self.parts


class Link:
    """The socket to one peer, with the frames that are being sent and the frame that is being received."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.sending: deque[Sent] = deque()
        self.head = bytearray()  # the length of the frame that is being received
        self.frame: memoryview | None = None
        self.filled = 0
        self.open = True

    def write(self) -> None:
        """Write as much as the socket takes. If the peer has gone, drop all frames."""
        while self.sending:
            parts = self.sending[0].parts
            try:
                taken = self.sock.send(parts[0])
            except BlockingIOError:
                return
            except OSError:  # the peer has gone; frames from it may still be read
                self.sending.clear()
                return
            if taken < len(parts[0]):
                parts[0] = parts[0][taken:]
                continue
            parts.popleft()
            if not parts:
                self.sending.popleft()

    def read(self) -> Iterable[memoryview]:
        """Yield the frames that have been received completely."""
        while self.open:
            try:
                if self.frame is None:
                    self.head += (got := self.sock.recv(LENGTH.size - len(self.head)))
                    self.open = bool(got)
                else:
                    count = self.sock.recv_into(self.frame[self.filled :])
                    self.filled += count
                    self.open = bool(count)
            except BlockingIOError:
                return
            except OSError:
                self.open = False
            if self.frame is None and len(self.head) == LENGTH.size:
                (nbytes,) = LENGTH.unpack(self.head)
                if nbytes > MOST_NBYTES:
                    raise ValueError(f"a frame has {nbytes} bytes, more than {MOST_NBYTES}")
                self.head, self.frame, self.filled = bytearray(), memoryview(bytearray(nbytes)), 0
            if self.frame is not None and self.filled == len(self.frame):
                complete, self.frame = self.frame, None
                yield complete


class SocketLinks:
    """`FrameLinks` over one socket for each peer."""

    name = "sockets"

    def __init__(self, links: dict[int, Link]) -> None:
        self._links = links

    def send(self, peer: int, parts: Sequence[memoryview]) -> Sent:
        link = self._links[peer]
        length = LENGTH.pack(sum(part.nbytes for part in parts))
        sent = Sent([memoryview(length), *parts])
        link.sending.append(sent)
        link.write()
        return sent

    def receive(self) -> Iterable[tuple[int, memoryview]]:
        for peer, link in self._links.items():
            link.write()
            for frame in link.read():
                yield peer, frame

    def ended(self, peer: int) -> bool:
        return peer in self._links and not self._links[peer].open

    def close(self) -> None:
        for link in self._links.values():
            link.open = False
            link.sock.close()


def open_sockets(bootstrap: Bootstrap) -> FramedTransport:
    """Return the transport of this rank. This is the factory that the entry point names."""
    token, name = os.urandom(TOKEN_NBYTES), f"\0sockets-{os.urandom(16).hex()}"
    socks: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(name)
        listening.listen(bootstrap.size)
        # After the exchange every rank listens, so that `connect` does not wait for a peer.
        tokens_and_names = bootstrap.exchange(token + name.encode())
        try:
            for peer in range(bootstrap.rank):
                socks[peer] = socket.socket(socket.AF_UNIX)
                socks[peer].connect(tokens_and_names[peer][TOKEN_NBYTES:])
                socks[peer].sendall(RANK.pack(bootstrap.rank) + token)
            while len(socks) < bootstrap.size - 1:
                listening.settimeout(bootstrap.remaining_s)
                sock, _ = listening.accept()
                peer = peer_of(sock, tokens_and_names, bootstrap)
                if peer in socks or peer <= bootstrap.rank:
                    sock.close()  # not a rank of this job
                else:
                    socks[peer] = sock
        except BaseException:
            for sock in socks.values():
                sock.close()
            raise
    return FramedTransport(SocketLinks({peer: Link(sock) for peer, sock in socks.items()}), bootstrap)


def peer_of(sock: socket.socket, tokens_and_names: Sequence[bytes], bootstrap: Bootstrap) -> int:
    """Return the rank that has connected, by the token that only it has; -1 if it is no rank of this job."""
    sock.settimeout(min(1.0, bootstrap.remaining_s))
    try:
        hello = sock.recv(RANK.size + TOKEN_NBYTES, socket.MSG_WAITALL)
    except OSError:
        return -1
    peer = RANK.unpack(hello[: RANK.size])[0] if len(hello) == RANK.size + TOKEN_NBYTES else bootstrap.size
    proven = peer < bootstrap.size and hmac.compare_digest(hello[RANK.size :], tokens_and_names[peer][:TOKEN_NBYTES])
    return peer if proven else -1
