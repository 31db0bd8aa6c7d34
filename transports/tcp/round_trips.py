"""The least round trip of a TCP connection, as the kernel has measured it, however long processes wait for a core."""

from __future__ import annotations

import contextlib
import socket
import struct

# The place of the least round trip, in microseconds, in the kernel's struct tcp_info.
_TCP_INFO_NBYTES, _MIN_RTT, _UNMEASURED = 192, 148, 0xFFFFFFFF


def least_round_trip_s(sock: socket.socket) -> float:
    """Return the least round trip of a connection in seconds; 0 if it is not TCP, or the kernel does not say."""
    if sock.family == socket.AF_UNIX:
        return 0.0
    with contextlib.suppress(OSError, struct.error):
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_NBYTES)
        (least_us,) = struct.unpack_from("I", info, _MIN_RTT)
        return 0.0 if least_us == _UNMEASURED else float(least_us) / 1e6
    return 0.0
