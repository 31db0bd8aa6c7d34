"""What a pool and its ranks say to each other, over a socket that only the two of them have.

A message is its length in 8 bytes and a pickle. Unpickling is safe here because parent and child run the same program
for the same user, and nobody else can reach the socket: it has no name.
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

from unisono.options import Options

_LENGTH = struct.Struct("!Q")
_CHUNK_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a rank: where it looks for modules, and the options of its communicator."""

    path: list[str]
    options: Options | None


@dataclass(frozen=True, slots=True)
class Task:
    """A call ``function(communicator, *arguments)``."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Success:
    """What the function has returned."""

    result: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """What the function has raised.

    Attributes:
        exception: the exception, pickled; it may turn out that it cannot be unpickled.
        summary: its type and message.
        traceback: the traceback as text.
    """

    exception: bytes
    summary: str
    traceback: str


def pickled(value: object) -> bytes:
    """Return `value` as a pickle, with functions and classes that cannot be imported elsewhere by value."""
    data: bytes = cloudpickle.dumps(value)
    return data


def encoded(message: object) -> bytes:
    """Return `message` as it travels; raises what pickling raises."""
    data = pickled(message)
    return _LENGTH.pack(len(data)) + data


@contextmanager
def by_value(function: Callable[..., Any]) -> Iterator[None]:
    """Pickle what is in the module of `function` by value, if the ranks could not import that module.

    So it is with tests, and with scripts run by other programs: their modules are not found along `sys.path`.
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
    """Return the next message, waiting for it; None if the peer has closed."""
    inbox = Inbox()
    while not inbox.complete:
        if not inbox.read(sock):
            return None
    return inbox.message()


class Inbox:
    """Receives one message in as many pieces as it comes in."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def complete(self) -> bool:
        """Whether the whole message is there."""
        return self._wanted() == 0

    def read(self, sock: socket.socket) -> bool:
        """Read what is there of the message, waiting for at least a byte; return False if the peer has closed."""
        try:
            data = sock.recv(min(self._wanted(), _CHUNK_NBYTES))
        except ConnectionResetError:  # It ended with unread messages.
            return False
        self._data += data
        return bool(data)

    def message(self) -> Any:
        """Return the complete message, unpickled."""
        return pickle.loads(memoryview(self._data)[_LENGTH.size :])

    def _wanted(self) -> int:
        have = len(self._data)
        if have < _LENGTH.size:
            return _LENGTH.size - have
        (length,) = _LENGTH.unpack_from(self._data)
        return int(length) + _LENGTH.size - have
