"""The message libraries of a rank (UCX and MPI, together *fabrics*), and how two ranks agree on a channel over one.

Two ranks have an authenticated socket. The dialler sends its address, in the form of the library, and the tag on which
it receives. The other rank answers with its own address and tag, or with the reason why it cannot use the library. The
socket then stays open: when it ends, the other rank has gone.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from unisono.errors import TransportUnavailableError
from unisono.foundation.wire import more
from unisono.transports import _core
from unisono.transports.contracts.call import MemoryType

# Whether the library is usable, the tag, and the length of the address (or else of the reason) that follows.
_WORD = struct.Struct("!?QI")
_MOST_NBYTES = 1 << 16


class FabricError(TransportUnavailableError):
    """This rank or the dialled rank cannot use a fabric. Another transport may work."""


class Proposal(NamedTuple):
    """The address of a rank in a fabric and the tag on which it receives, or the reason why it cannot use it."""

    address: bytes
    tag: int
    reason: str = ""

    def check(self) -> None:
        """Raise `FabricError` with the reason, if there is one."""
        if self.reason:
            raise FabricError(self.reason)

    def pack(self) -> bytes:
        """Return the proposal in its wire format."""
        text = self.reason.encode() if self.reason else self.address
        return _WORD.pack(not self.reason, self.tag, len(text)) + text

    @classmethod
    def received(cls, sock: socket.socket, received: bytearray) -> Proposal | None:
        """Read from a socket that is readable; return the proposal once it is complete, and None before.

        Args:
            sock: the socket.
            received: the bytes received so far; the method appends to it.

        Raises:
            OSError: the other side has gone, or sent no proposal.
        """
        if not more(sock, received, _nbytes(received), socket.MSG_DONTWAIT) or len(received) < _nbytes(received):
            return None
        is_usable, tag, _ = _WORD.unpack_from(received)
        text = bytes(received[_WORD.size :])
        return cls(text, tag) if is_usable else cls(b"", 0, text.decode("utf-8", "replace"))


class Fabrics:
    """The fabrics among `names`, opened for this rank; if one cannot be opened, its reason is kept.

    Args:
        names: names of transports; all but fabrics are ignored.
        rank: this rank.
        comm: the communicator of mpi4py on which the ranks have met, or None.
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
        fabrics = {name: opener for name, opener in openers.items() if name in names}
        for name, opener in fabrics.items():
            try:
                self._messengers[name] = opener()
            except TransportUnavailableError as error:
                self._reasons[name] = error.message

    def obstacle(self, name: str) -> str:
        """Return the reason why this rank cannot use the fabric `name`, as text; an empty text if it can."""
        if name in self._messengers:
            return ""
        reason = self._reasons.get(name, f"{name} is not among the transports of this job")
        return f"rank {self._rank} cannot use {name}: {reason}"

    def messenger(self, name: str) -> _core.Messenger:
        """Return the messenger of a fabric.

        Raises:
            FabricError: this rank cannot use the fabric; the message says why.
        """
        if obstacle := self.obstacle(name):
            raise FabricError(obstacle)
        return self._messengers[name]

    def carries(self, name: str, memory: MemoryType) -> bool:
        """Return whether the transport is a fabric of this rank that carries `memory`."""
        return name in self._messengers and self._messengers[name].supports(memory)

    def propose(self, name: str, theirs: Proposal | None = None) -> Proposal:
        """Return the proposal of this rank for one channel over a fabric.

        Args:
            name: the fabric.
            theirs: the proposal of the rank that has dialled, or None if this rank dials. This rank tries to reach that
                address, so the other rank learns of a failure and can try its next transport.
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
        # In MPI a rank number is the address.
        return struct.pack("=i", self._rank) if name == "mpi" else self._messengers[name].address()


# These import on demand, as most jobs need neither library.
def _open_ucx(interface: str) -> _core.Messenger:
    from unisono.transports.ucx import library

    return library.open_messenger(interface)


def _open_mpi(comm: Any) -> _core.Messenger:
    from unisono.transports.mpi import messenger

    return messenger.open_messenger(comm)


def _nbytes(received: bytearray) -> int:
    """Return the length of the proposal that begins with `received`, or of its header as long as that is missing."""
    if len(received) < _WORD.size:
        return _WORD.size
    nbytes: int = _WORD.unpack_from(received)[2]
    if nbytes > _MOST_NBYTES:
        raise OSError(f"the other rank sent a proposal of {nbytes} bytes, and at most {_MOST_NBYTES} are allowed")
    return _WORD.size + nbytes
