"""Passes shared memory and doorbells over the socket between two ranks, and detects that its other end has died."""

from __future__ import annotations

import contextlib
import errno
import os
import socket

from unisono.deadlines import LONGEST_WAIT_S
from unisono.transports import _core
from unisono.transports.host.sealed_memory import sealed_memory

_PASS_TIMEOUT_S = 5.0
_DESCRIPTORS = 3
# The other end is lost after so many missed heartbeats.
_HEARTBEATS = 4
# The longest period that the kernel allows.
_LONGEST_PERIOD_S = 32_767


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
    _, descriptors, flags, _ = socket.recv_fds(sock, 1, _DESCRIPTORS)
    if len(descriptors) != _DESCRIPTORS:
        for descriptor in descriptors:
            os.close(descriptor)
        if flags & socket.MSG_CTRUNC:  # this process is at its limit of open files
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        raise OSError(f"the peer passed {len(descriptors)} descriptors for a channel instead of {_DESCRIPTORS}")
    memory, peer_bell, bell = descriptors
    return memory, peer_bell, bell


def watch(sock: socket.socket, timeout_s: float) -> None:
    """Let the kernels of both ends exchange heartbeats; the connection ends after `timeout_s` without one."""
    timeout_s = min(timeout_s, LONGEST_WAIT_S)
    period_s = min(max(1, int(timeout_s / _HEARTBEATS)), _LONGEST_PERIOD_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, period_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, period_s)
    # The same limit for data that is sent but not acknowledged when the other end falls silent.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1e3))


def process_descriptor(sock: socket.socket) -> int:
    """Return a pidfd of the process at the other end of a Unix socket, or -1 for a process of another host."""
    if sock.family != socket.AF_UNIX:
        return -1
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid = int.from_bytes(credentials[:4], "little")
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # another pid namespace, or no pidfd_open: then the end of the link must suffice
        return -1
