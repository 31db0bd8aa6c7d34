"""Passes shared memory and doorbells over the socket between two ranks."""

from __future__ import annotations

import contextlib
import errno
import os
import socket

from unisono.transports import _core
from unisono.transports.host.sealed_memory import sealed_memory

_PASS_TIMEOUT_S = 5.0
_DESCRIPTORS = 3


def share_memory(sock: socket.socket) -> tuple[int, int, int]:
    """Create the memory of a channel and a doorbell for each side, pass them to the peer, and return the descriptors.

    The result is the memory, the doorbell of this side, and the doorbell of the peer.
    """
    flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
    descriptors: list[int] = []
    try:
        descriptors.append(sealed_memory("unisono-channel", _core.SHM_NBYTES))
        descriptors.append(os.eventfd(0, flags))
        descriptors.append(os.eventfd(0, flags))
        # The peer may have left the communicator already. If a call still needs it, the channel detects that later.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(sock, [b"\0"], descriptors)
    except OSError:  # for example at the limit of open files
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    memory, bell, peer_bell = descriptors
    return memory, bell, peer_bell


def take_shared_memory(sock: socket.socket) -> tuple[int, int, int]:
    """Return the memory, the peer's doorbell and this side's doorbell, which the dialler passes after the handshake."""
    sock.settimeout(_PASS_TIMEOUT_S)
    data, descriptors, flags, _ = socket.recv_fds(sock, 1, _DESCRIPTORS)
    if not data:
        raise ConnectionError("the peer has closed the connection before it passed the memory of the channel")
    if len(descriptors) != _DESCRIPTORS:
        for descriptor in descriptors:
            os.close(descriptor)
        if flags & socket.MSG_CTRUNC:  # this process is at its limit of open files
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        raise OSError(f"the peer passed {len(descriptors)} descriptors for a channel instead of {_DESCRIPTORS}")
    memory, peer_bell, bell = descriptors
    return memory, peer_bell, bell
