"""Messages between two processes that agree on the membership of a job: `send`, `receive` and `readable`.

A message is a length of four bytes and an object in JSON. The handshake has been completed before, so the sender is a
process of the job. Its messages are data nevertheless: the receiver checks the fields.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
from typing import Any

from unisono.foundation.deadlines import Deadline
from unisono.foundation.json_checks import checked, parsed_json

_LENGTH = struct.Struct("!I")
_MESSAGE_LIMIT = 1 << 20
# A peer that takes no bytes for so long is stopped or cut off.
_SEND_S = 5.0


def send(link: socket.socket, message: dict[str, Any]) -> None:
    """Send a message; do nothing if the other side has gone, because the end of the link shows that later."""
    data = json.dumps(message).encode()
    with contextlib.suppress(OSError):
        link.settimeout(_SEND_S)
        link.sendall(_LENGTH.pack(len(data)) + data)


def receive(link: socket.socket, deadline: Deadline) -> dict[str, Any]:
    """Return the next message.

    Raises:
        TimeoutError: no message arrived before `deadline`.
        OSError: the other side has gone.
        ValueError: the bytes are not a message.
    """
    (nbytes,) = _LENGTH.unpack(_exactly(link, _LENGTH.size, deadline))
    if nbytes > _MESSAGE_LIMIT:
        raise ValueError("a message is too long")
    message: dict[str, Any] = checked(parsed_json(_exactly(link, nbytes, deadline)), dict, "a message")
    return message


def readable(links: list[socket.socket]) -> list[socket.socket]:
    """Return the connections that can be read. That of a process which must only wait has ended."""
    poll = select.poll()
    by_descriptor = {link.fileno(): link for link in links}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    return [by_descriptor[descriptor] for descriptor, _ in poll.poll(0)]


def _exactly(link: socket.socket, nbytes: int, deadline: Deadline) -> bytes:
    received = b""
    while len(received) < nbytes:
        link.settimeout(deadline.remaining_s())
        data = link.recv(nbytes - len(received))
        if not data:
            raise ConnectionResetError("it closed the connection")
        received += data
    return received
