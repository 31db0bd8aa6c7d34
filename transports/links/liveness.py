"""Detects that the other end of a control link is gone: heartbeats between hosts, a process descriptor on one host."""

from __future__ import annotations

import os
import socket

from unisono.deadlines import LONGEST_WAIT_S

# The other end is lost after so many missed heartbeats.
_HEARTBEATS = 4
# The longest period that the kernel allows.
_LONGEST_PERIOD_S = 32_767


def watch(sock: socket.socket, timeout_s: float) -> None:
    """Let the kernels of both ends exchange heartbeats; the connection ends after `timeout_s` without one.

    The kernel of a rank that computes or is stopped answers heartbeats, so only a lost host or network ends the
    connection. Heartbeats sent by the ranks could not tell a stopped rank from a lost one.
    """
    timeout_s = min(timeout_s, LONGEST_WAIT_S)
    period_s = min(max(1, int(timeout_s / _HEARTBEATS)), _LONGEST_PERIOD_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, period_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, period_s)
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
