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
from unisono.foundation.wire import Framing, json_of

_FRAMING = Framing(struct.Struct("!I"), limit=1 << 20)
# A peer that takes no bytes for so long is stopped or cut off.
_SEND_S = 5.0


def send(link: socket.socket, message: dict[str, Any]) -> None:
    """Send a message; do nothing if the other side has gone, because the end of the link shows that later."""
    data = _FRAMING.framed(json.dumps(message).encode())
    with contextlib.suppress(OSError):
        link.settimeout(_SEND_S)
        link.sendall(data)


def receive(link: socket.socket, deadline: Deadline, shape: Any = dict) -> dict[str, Any]:
    """Return the next message, which must have a shape, as `json_checks.checked` describes it.

    Raises:
        TimeoutError: no message arrived before `deadline`.
        OSError: the other side has gone.
        ValueError: the bytes are not such a message.
    """
    message: dict[str, Any] = json_of(_FRAMING.receive(link, deadline), shape)
    return message


def readable(links: list[socket.socket]) -> list[socket.socket]:
    """Return the connections that can be read. That of a process which must only wait has ended."""
    poll = select.poll()
    by_descriptor = {link.fileno(): link for link in links}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    return [by_descriptor[descriptor] for descriptor, _ in poll.poll(0)]
