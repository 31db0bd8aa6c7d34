"""What two ranks do with the socket that joins them: pass memory and doorbells over it, and find its other end dead."""

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
# As many may be missed until the other end is lost.
_HEARTBEATS = 4
# The longest period that the kernel takes.
_LONGEST_PERIOD_S = 32_767


def share_memory(sock: socket.socket) -> tuple[int, int, int]:
    """Make sealed memory for a channel, this side's doorbell and the other's; pass and return their descriptors."""
    flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
    descriptors: list[int] = []
    try:
        descriptors.append(sealed_memory("unisono-channel", _core.SHM_NBYTES))
        descriptors.append(os.eventfd(0, flags))
        descriptors.append(os.eventfd(0, flags))
        # A peer that has left the communicator has ended its calls, and the channel finds out if one needs it still.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(sock, [b"\0"], descriptors)
    except OSError:  # such as the limit of descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    memory, bell, peer_bell = descriptors
    return memory, bell, peer_bell


def take_shared_memory(sock: socket.socket) -> tuple[int, int, int]:
    """Return the descriptors that the dialling side passes right after the hello, in its order."""
    sock.settimeout(_PASS_TIMEOUT_S)
    _, descriptors, flags, _ = socket.recv_fds(sock, 1, _DESCRIPTORS)
    if len(descriptors) != _DESCRIPTORS:
        for descriptor in descriptors:
            os.close(descriptor)
        if flags & socket.MSG_CTRUNC:  # this process has no room for more
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        raise OSError(f"{len(descriptors)} descriptors were passed for a channel, not {_DESCRIPTORS}")
    memory, peer_bell, bell = descriptors
    return memory, peer_bell, bell


def watch(sock: socket.socket, timeout_s: float) -> None:
    """Let the kernels of both ends exchange heartbeats, and end the connection when there are none for `timeout_s`."""
    timeout_s = min(timeout_s, LONGEST_WAIT_S)
    period_s = min(max(1, int(timeout_s / _HEARTBEATS)), _LONGEST_PERIOD_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, period_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, period_s)
    # Of what is under way when the other end falls silent, too.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1e3))


def process_descriptor(sock: socket.socket) -> int:
    """Return a pidfd of the process at the other end of a Unix socket, or -1 for a process of another host."""
    if sock.family != socket.AF_UNIX:
        return -1
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid = int.from_bytes(credentials[:4], "little")
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # another pid namespace, or no pidfd_open: the end of the link will tell
        return -1
