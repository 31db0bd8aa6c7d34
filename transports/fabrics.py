"""The libraries of tagged messages of a rank (UCX and MPI), and how two ranks agree on a channel over one of them.

The dialling side has an authenticated socket to the other. It says where it is, in the words of the library, and the
tag that it wants to be sent to; the other side answers likewise, or with the reason why it cannot. The socket then
stays open as the witness of both lives.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from unisono.errors import TransportUnavailableError
from unisono.transports import _core
from unisono.transports.base import MemoryType

FABRICS = ("ucx", "mpi")

# Whether it can be had, the tag, and the length of the address, or of the reason, that follows.
_WORD = struct.Struct("!?QI")
_MOST_NBYTES = 1 << 16
_TIMEOUT_S = 5.0


class FabricError(TransportUnavailableError):
    """A fabric cannot be used, by this rank or by the one that was dialled; another transport may be."""


class Agreed(NamedTuple):
    """How the other rank is reached: its address, the tag that it listens to, and the one that we listen to."""

    address: bytes
    out_tag: int
    in_tag: int


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

    def messenger(self, name: str) -> _core.Messenger:
        """Return the messenger of a fabric.

        Raises:
            FabricError: this rank has none; it says why.
        """
        if name in self._messengers:
            return self._messengers[name]
        reason = self._reasons.get(name, f"{name} is not among the transports of this job")
        raise FabricError(f"rank {self._rank} cannot use {name}: {reason}")

    def knows(self, name: str, memory: MemoryType) -> bool:
        """Return whether a transport is a fabric of this rank that carries such memory."""
        return name in self._messengers and self._messengers[name].knows(memory)

    def propose(self, name: str, sock: socket.socket) -> Agreed:
        """Agree on a channel with the rank that was dialled.

        Raises:
            FabricError: this rank or the other cannot use it.
            OSError: the other rank did not answer.
        """
        messenger = self.messenger(name)
        tag = messenger.reserve()
        _say(sock, True, tag, self._address(name))
        can, theirs, address = _hear(sock)
        if not can:
            raise FabricError(address.decode("utf-8", "replace"))
        return Agreed(address, theirs, tag)

    def accept(self, name: str, sock: socket.socket) -> Agreed | None:
        """Agree on a channel with the rank that has dialled; None if this rank cannot, and has said why.

        It says so before it opens a channel, so that the other rank can try its next transport.

        Raises:
            OSError: the other rank did not say what it wants.
        """
        _, theirs, address = _hear(sock)
        try:
            messenger = self.messenger(name)
            messenger.reach(address)
        except (FabricError, RuntimeError) as error:
            _say(sock, False, 0, str(error).encode())
            return None
        tag = messenger.reserve()
        _say(sock, True, tag, self._address(name))
        return Agreed(address, theirs, tag)

    def _address(self, name: str) -> bytes:
        # Ranks of MPI know each other by their numbers.
        return struct.pack("=i", self._rank) if name == "mpi" else self._messengers[name].address()


# What is not used is not loaded.
def _open_ucx(interface: str) -> _core.Messenger:
    from unisono.transports import ucx

    return ucx.open_messenger(interface)


def _open_mpi(comm: Any) -> _core.Messenger:
    from unisono.transports import mpi

    return mpi.open_messenger(comm)


def _say(sock: socket.socket, can: bool, tag: int, text: bytes) -> None:
    sock.settimeout(_TIMEOUT_S)
    sock.sendall(_WORD.pack(can, tag, len(text)) + text)


def _hear(sock: socket.socket) -> tuple[bool, int, bytes]:
    sock.settimeout(_TIMEOUT_S)
    can, tag, nbytes = _WORD.unpack(_exactly(sock, _WORD.size))
    if nbytes > _MOST_NBYTES:
        raise OSError(f"an address of {nbytes} bytes cannot be")
    return can, tag, _exactly(sock, nbytes)


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        more = sock.recv(nbytes - len(found))
        if not more:
            raise ConnectionResetError("it closed the connection")
        found += more
    return found
