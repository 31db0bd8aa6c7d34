"""The libraries of tagged messages of a rank (UCX and MPI), and how two ranks agree on a channel over one of them.

The dialling side has an authenticated socket to the other. It says where it is, in the words of the library, and the
tag that it wants to be sent to; the other side answers the same of itself, or with the reason why it cannot. The socket
then stays open: its end shows that the other rank has gone.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from unisono.errors import TransportUnavailableError
from unisono.transports import _core
from unisono.transports.contracts.call import MemoryType

FABRICS = ("ucx", "mpi")

# Whether it can be had, the tag, and the length of the address, or of the reason, that follows.
_WORD = struct.Struct("!?QI")
_MOST_NBYTES = 1 << 16


class FabricError(TransportUnavailableError):
    """A fabric cannot be used, by this rank or by the one that was dialled; another transport may be."""


class Proposal(NamedTuple):
    """How a rank is reached by a fabric: its address and the tag that it listens to; or why it cannot be."""

    address: bytes
    tag: int
    reason: str = ""

    def check(self) -> None:
        """Raise `FabricError` with the reason, if there is one."""
        if self.reason:
            raise FabricError(self.reason)

    def pack(self) -> bytes:
        """Return the bytes that say it."""
        text = self.reason.encode() if self.reason else self.address
        return _WORD.pack(not self.reason, self.tag, len(text)) + text

    @classmethod
    def received(cls, sock: socket.socket, received: bytearray) -> Proposal | None:
        """Read from a socket that has something to read; return the proposal once it has come, and None before.

        Args:
            sock: the socket.
            received: what has come so far, which grows.

        Raises:
            OSError: the other side has gone, or what it says is no proposal.
        """
        needed = _WORD.size
        if len(received) >= needed:
            needed += _text_nbytes(received)
        data = sock.recv(needed - len(received), socket.MSG_DONTWAIT)
        if not data:
            raise ConnectionResetError("it closed the connection")
        received += data
        if len(received) < _WORD.size or len(received) < _WORD.size + _text_nbytes(received):
            return None
        can, tag, _ = _WORD.unpack_from(received)
        text = bytes(received[_WORD.size :])
        return cls(text, tag) if can else cls(b"", 0, text.decode("utf-8", "replace"))


class Fabrics:
    """Those of `names` that this rank can use.

    Args:
        names: of transports; others than fabrics are not looked at.
        rank: this rank.
        comm: the communicator of mpi4py by which the ranks have met, or None.
        interface: the network interface on which UCX may listen for TCP; empty if it must not.
    """

    def __init__(self, names: Iterable[str], rank: int, comm: Any, interface: str = "") -> None:
        openers: dict[str, Callable[[], _core.Messenger]] = {
            "ucx": lambda: _open_ucx(interface),
            "mpi": lambda: _open_mpi(comm),
        }
        self._rank = rank
        self._messengers: dict[str, _core.Messenger] = {}
        self._reasons: dict[str, str] = {}
        for name in FABRICS:
            if name not in names:
                continue
            try:
                self._messengers[name] = openers[name]()
            except TransportUnavailableError as error:
                self._reasons[name] = error.message

    def obstacle(self, name: str) -> str:
        """Return why this rank cannot use a fabric; empty if it can."""
        if name in self._messengers:
            return ""
        reason = self._reasons.get(name, f"{name} is not among the transports of this job")
        return f"rank {self._rank} cannot use {name}: {reason}"

    def messenger(self, name: str) -> _core.Messenger:
        """Return the messenger of a fabric.

        Raises:
            FabricError: this rank has none; it says why.
        """
        if obstacle := self.obstacle(name):
            raise FabricError(obstacle)
        return self._messengers[name]

    def knows(self, name: str, memory: MemoryType) -> bool:
        """Return whether a transport is a fabric of this rank that carries such memory."""
        return name in self._messengers and self._messengers[name].knows(memory)

    def propose(self, name: str, theirs: Proposal | None = None) -> Proposal:
        """Return how this rank is reached for one channel by a fabric; or why it is not.

        Args:
            name: the fabric.
            theirs: what the rank that has dialled proposes. This rank tries to reach it, so that the other rank learns
                of a failure, and can try its next transport.
        """
        if obstacle := self.obstacle(name):
            return Proposal(b"", 0, obstacle)
        if theirs is not None:
            try:
                self._messengers[name].reach(theirs.address)
            except RuntimeError as error:
                return Proposal(b"", 0, str(error))
        return Proposal(self._address(name), self._messengers[name].reserve())

    def _address(self, name: str) -> bytes:
        # Ranks of MPI know each other by their numbers.
        return struct.pack("=i", self._rank) if name == "mpi" else self._messengers[name].address()


# What is not used is not loaded.
def _open_ucx(interface: str) -> _core.Messenger:
    from unisono.transports.ucx import library

    return library.open_messenger(interface)


def _open_mpi(comm: Any) -> _core.Messenger:
    from unisono.transports.mpi import messenger

    return messenger.open_messenger(comm)


def _text_nbytes(received: bytearray) -> int:
    nbytes: int = _WORD.unpack_from(received)[2]
    if nbytes > _MOST_NBYTES:
        raise OSError(f"an address of {nbytes} bytes cannot be")
    return nbytes
