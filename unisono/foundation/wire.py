"""Messages over sockets: each is a length in bytes, followed by as many bytes.

One place decides about limits, deadlines and closed connections.

`more` reads the bytes that have arrived, for event loops, and `exactly` waits for all bytes of a message. `Framing` is
a header with the length of the message. A peer may be a stranger, so a framing has a limit.

Used by: the messages of members, joiners and survivors of a job, swarms, stores, pools of ranks, and resumed
connections.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, Protocol

from unisono.foundation.deadlines import Deadline
from unisono.foundation.json_checks import checked, parsed_json

# At most this many bytes are read at a time, because a read allocates memory for all bytes that it asks for.
_CHUNK_NBYTES = 1 << 20


class _Socket(Protocol):
    def recv(self, nbytes: int, flags: int = 0, /) -> bytes: ...

    def settimeout(self, timeout_s: float | None, /) -> None: ...


def more(sock: _Socket, received: bytearray, nbytes: int, flags: int = 0) -> bool:
    """Read bytes that have arrived, at least one; return whether `received` has `nbytes` now, which it never exceeds.

    Args:
        sock: the socket.
        received: the bytes of the message so far, fewer than `nbytes`; the function appends to it.
        nbytes: the length of the message.
        flags: those of `socket.recv`.

    Raises:
        OSError: the other side has closed the connection (`ConnectionResetError`), or the socket cannot be read.
    """
    data = sock.recv(min(nbytes - len(received), _CHUNK_NBYTES), flags)
    if not data:
        raise ConnectionResetError("it closed the connection")
    received += data
    return len(received) >= nbytes


def exactly(sock: _Socket, nbytes: int, deadline: Deadline | None = None) -> bytes:
    """Wait for `nbytes` bytes, and return them. Without a deadline, the timeout of the socket limits each read.

    Raises:
        TimeoutError: they did not all arrive before the deadline.
        OSError: as `more`.
    """
    received = bytearray()
    while len(received) < nbytes:
        if deadline is not None:
            sock.settimeout(deadline.remaining_s())
        more(sock, received, nbytes)
    return bytes(received)


class Framing(NamedTuple):
    """How the messages of a protocol are framed.

    Attributes:
        header: the format of the length, in front of the message.
        limit: the most bytes of a message; None if the peer is trusted.
    """

    header: struct.Struct
    limit: int | None = None

    def framed(self, message: bytes) -> bytes:
        """Return the bytes of a message on the wire."""
        return self.header.pack(len(message)) + message

    def nbytes(self, received: bytes | bytearray) -> int:
        """Return the size of the frame that begins with `received`.

        As long as the header is incomplete, return its size.

        Raises:
            ValueError: the message is too long.
        """
        if len(received) < self.header.size:
            return self.header.size
        (nbytes,) = self.header.unpack_from(received)
        if self.limit is not None and nbytes > self.limit:
            raise ValueError("a message is too long")
        return int(self.header.size + nbytes)

    def receive(self, sock: _Socket, deadline: Deadline) -> bytes:
        """Wait for the next message and return it.

        Raises:
            TimeoutError: it did not arrive before the deadline.
            OSError: the other side has gone.
            ValueError: the message is too long.
        """
        header = exactly(sock, self.header.size, deadline)
        return exactly(sock, self.nbytes(header) - len(header), deadline)


def json_of(message: bytes, shape: Any, name: str = "a message") -> Any:
    """Return the value of a message in JSON, which must have a shape; raises the errors of `json_checks.checked`."""
    return checked(parsed_json(message), shape, name)
