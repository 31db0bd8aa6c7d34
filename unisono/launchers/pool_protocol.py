"""The messages between a pool and its ranks, over a socket that only the two of them have.

A message is its length in 8 bytes and a pickle. Unpickling is safe here: parent and child run the same program for the
same user, and no other process can reach the socket, because it has no name.
"""

from __future__ import annotations

import pickle
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from unisono.foundation.wire import Framing, more
from unisono.options import Options

_FRAMING = Framing(struct.Struct("!Q"))


@dataclass(frozen=True, slots=True)
class RankSetup:
    """The first message to a rank.

    Attributes:
        path: its ``sys.path``.
        options: the options of its communicator; None for the defaults.
    """

    path: list[str]
    options: Options | None


@dataclass(frozen=True, slots=True)
class PoolCall:
    """A call ``function(communicator, *arguments)``."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Success:
    """The answer of a rank whose function has returned."""

    result: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """The answer of a rank whose function has raised an exception.

    Attributes:
        exception: the pickled exception; empty if it cannot be pickled. Unpickling it may fail.
        summary: its type and message.
        traceback: the traceback as text.
    """

    exception: bytes
    summary: str
    traceback: str


def pickled(value: object) -> bytes:
    """Return the pickle of `value`. Functions and classes that a rank cannot import are pickled by value."""
    data: bytes = cloudpickle.dumps(value)
    return data


def encoded(message: object) -> bytes:
    """Return the bytes of `message` on the wire. Raises the errors of pickling."""
    return _FRAMING.framed(pickled(message))


@contextmanager
def by_value(function: Callable[..., Any]) -> Iterator[None]:
    """Inside the block, pickle the module of `function` by value if the ranks cannot import it.

    Tests and scripts that another program runs are examples: their modules are not on `sys.path`.
    """
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or _can_be_imported(module.__name__):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _can_be_imported(name: str) -> bool:
    return name in sys.builtin_module_names or PathFinder.find_spec(name.partition(".")[0]) is not None


def receive(sock: socket.socket) -> Any:
    """Wait for the next message and return it; None if the peer has closed the socket."""
    inbox = Inbox()
    while not inbox.complete:
        if not inbox.read(sock):
            return None
    return inbox.message()


class Inbox:
    """A buffer that receives one message piece by piece."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def complete(self) -> bool:
        """Whether the whole message has been received."""
        return len(self._data) == _FRAMING.nbytes(self._data)

    def read(self, sock: socket.socket) -> bool:
        """Read the available bytes of the message, at least one; return False if the peer has closed the socket."""
        try:
            more(sock, self._data, _FRAMING.nbytes(self._data))
        except ConnectionResetError:  # also if the peer ended without reading all messages
            return False
        return True

    def message(self) -> Any:
        """Return the complete message, unpickled."""
        return pickle.loads(memoryview(self._data)[_FRAMING.header.size :])
