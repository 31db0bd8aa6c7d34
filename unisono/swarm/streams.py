"""Streams: connections to a process that cannot be dialled, over one that it has dialled, or through a relay.

Theory of operation
-------------------
A stream begins with the handshake, without TLS, so both ends hold the key of the job. Then the dialer sends

    park      this is process B, which you cannot dial: keep this connection until you need one to B
    connect   pass on everything that follows to the listener of process B at this port

A process that is B itself answers, and gives the connection to its listener. Any other process is a *relay*. It opens a
stream to B, sends ``connect`` there, and then copies bytes both ways. Over a parked connection, the process that keeps
it sends ``connect``. So one of two processes must be able to dial the other, or both a relay:

    A → B             B parks at A         B, C park at R                C cannot be dialled by A
    dials             A: connect → B       B: connect C → R → C          A: connect C → R → C

The listener then sees a connection like any other: it begins with its own handshake and TLS between the two ends. So a
relay copies encrypted bytes, and can at most end the connection.

A relay reads at most 256 KiB before it has written them, so a slow reader slows the writer. All messages here have at
most `MOST_NBYTES`.

Used by: `stream_server`, which serves streams; `parking`, which parks them; and `routes`, which opens them.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from typing import Any

from unisono.errors import UnisonoError
from unisono.foundation.deadlines import Deadline
from unisono.foundation.wire import Framing, json_of
from unisono.transports.links.dialer import DialingRank, Target, dial
from unisono.transports.links.handshake import NO_RANK, Purpose
from unisono.transports.links.listener import Addresses

MOST_NBYTES = 512
"""The most bytes of a message."""

MESSAGE_S = 10.0
"""How long a message may take, once a stream has begun."""

_FRAMING = Framing(struct.Struct("!H"), limit=MOST_NBYTES)


class GoneError(ConnectionRefusedError):
    """The process at the other end of a stream has ended."""


class NoWayError(OSError):
    """A process cannot be reached now."""


def open_stream(caller: DialingRank, host: str, port: int, timeout_s: float) -> socket.socket:
    """Dial a process, and return the stream; raises OSError if it does not answer as one of this job in time."""
    target = Target(NO_RANK, Addresses("", "", host, port, 0), False, Purpose.STREAM)
    try:
        return dial(caller, target, timeout_s)[0]
    except UnisonoError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        raise NoWayError(error.message) from None


def ask_to_connect(stream: socket.socket, member: str, port: int, deadline: Deadline) -> None:
    """Let the other end of a stream pass it on to a listener.

    Raises:
        GoneError: the process of the listener has ended.
        OSError: the other end has gone, or cannot pass it on.
    """
    send(stream, {"do": "connect", "member": member, "port": port}, deadline)
    try:
        reply = receive(stream, deadline)
    except ValueError as error:
        raise NoWayError(str(error)) from None
    if reply.get("is_open") is not True:
        why = str(reply.get("error", "it does not pass the connection on"))
        raise GoneError(why) if reply.get("gone") is True else NoWayError(why)


def send(stream: socket.socket, message: dict[str, Any], deadline: Deadline) -> None:
    """Send a message on a stream before the deadline; raises OSError."""
    stream.settimeout(deadline.checked_remaining_s())
    stream.sendall(_FRAMING.framed(json.dumps(message).encode()))


def receive(stream: socket.socket, deadline: Deadline, shape: Any = dict) -> dict[str, Any]:
    """Return the next message of a stream; raises OSError, or ValueError if it has another shape."""
    message: dict[str, Any] = json_of(_FRAMING.receive(stream, deadline), shape)
    return message


def lift_limit(stream: socket.socket) -> None:
    """Let data wait on a connection as long as its reader computes, other than on a parked one."""
    with contextlib.suppress(OSError):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)


def hang_up(sock: socket.socket) -> None:
    """Wake the threads that use a connection, which then close it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
