"""How to notice that the other end of a link is gone: heartbeats between hosts, a process descriptor on one host."""

from __future__ import annotations

import os
import socket

from unisono.foundation.deadlines import LONGEST_WAIT_S

# The other end is lost after this many missed heartbeats.
_HEARTBEATS = 4
# The longest period that the kernel allows.
_LONGEST_PERIOD_S = 32_767


def exchange_heartbeats(sock: socket.socket, timeout_s: float) -> int:
    """Let the kernels of both ends exchange heartbeats, four in `timeout_s`; return their period in whole seconds.

    The kernel of a rank that computes or is stopped answers heartbeats, so only a lost host or network leaves them
    without an answer. Heartbeats sent by the ranks could not tell a stopped rank from a lost one. The native core looks
    for missing answers (transports/native/core/tcp/silence.h).
    """
    period_s = min(max(1, int(min(timeout_s, LONGEST_WAIT_S) / _HEARTBEATS)), _LONGEST_PERIOD_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, period_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, period_s)
    return period_s


def watch(sock: socket.socket, timeout_s: float) -> None:
    """Exchange heartbeats, and let the kernel end the connection after about `timeout_s` without an answer.

    This is for connections that nobody dials again.
    """
    timeout_s = min(timeout_s, LONGEST_WAIT_S)
    period_s = exchange_heartbeats(sock, timeout_s)
    # The limit, also for data that is sent but not acknowledged. The kernel compares it with the time of silence when a
    # heartbeat is due. If it were `timeout_s`, a clock tick more or less would decide whether that is a period later.
    limit_s = max(timeout_s - period_s / 2, timeout_s / 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limit_s * 1e3))


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
