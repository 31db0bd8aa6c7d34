"""The messages between the launcher and its agents on other hosts, over the standard streams of ssh.

A message is a line of JSON with one field, which is the name of the message. Before the first message, the agent
writes `BEGINNING`, because shells of some users write text of their own into the stream. Output of ranks is decoded as
Latin-1, which represents each byte by one character.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from unisono.foundation.json_checks import checked, exact_json

BEGINNING = b"unisono-agent\n"
LONGEST_MESSAGE_NBYTES = 1 << 24

# From the launcher. `start`: the whole work of the agent; the other messages control ranks that run.
TO_AGENT: Mapping[str, Any] = {
    "start": {
        "argv": [str],
        "folder": str,
        "environ": dict,
        "first": int,
        "count": int,
        "size": int,
        "node": int,
        "nodes": int,
        "store": str,
        "job": str,
        "key": str,
        "bind": (str, type(None)),
        "keep_going": bool,
        "timeout_s": (int, float, type(None)),
    },
    "end_after_failure": type(None),
    "forward": int,
    "kill": type(None),
    "pass_on": int,
    "report": type(None),
}
# From an agent. `hello`: its version and an address of its host. `store`: the URL of the store that it serves.
TO_LAUNCHER: Mapping[str, Any] = {
    "hello": {"version": str, "address": str},
    "store": str,
    "output": {"rank": int, "stream": str, "text": str},
    "ended": {"rank": int, "code": int, "stopped": bool, "pid": int},
    "report": str,
    "statistics": {"rank": int, "text": str},
    "error": str,
    "done": {"late": [int], "whereabouts": [str]},
}


class ProtocolError(Exception):
    """The other side does not speak this protocol."""


def encoded(name: str, value: Any = None) -> bytes:
    """Return a message as a line."""
    return json.dumps({name: value}).encode() + b"\n"


def decoded(line: bytes, shapes: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name and the value of a message.

    Raises:
        ProtocolError: it is not one of the messages in `shapes`.
    """
    try:
        message = exact_json(line)
        ((name, value),) = message.items()
        return name, checked(value, shapes[name], name)
    except (ValueError, KeyError, AttributeError) as error:
        raise ProtocolError(f"a message is malformed: {error}") from None


class MessageCutter:
    """Cuts a stream of bytes into messages.

    Attributes:
        prologue: the bytes before `BEGINNING`; all bytes as long as that has not come.
    """

    def __init__(self, shapes: Mapping[str, Any]) -> None:
        self.prologue = b""
        self._shapes = shapes
        self._rest = b""
        self._has_begun = False

    def feed(self, data: bytes) -> Iterator[tuple[str, Any]]:
        """Yield the messages that `data` completes; raises `ProtocolError`."""
        self._rest += data
        if len(self._rest) > LONGEST_MESSAGE_NBYTES:
            raise ProtocolError("a message is too long")
        if not self._has_begun:
            self.prologue, mark, rest = self._rest.partition(BEGINNING)
            if not mark:
                return
            self._has_begun, self._rest = True, rest
        while b"\n" in self._rest:
            line, _, self._rest = self._rest.partition(b"\n")
            yield decoded(line, self._shapes)
