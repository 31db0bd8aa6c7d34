"""Measurements of the kernel on TCP connections, which do not depend on how long processes wait for a core."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterable

# The places in the kernel's struct tcp_info of the largest packet's bytes, of the least round trip in microseconds, and
# of the number of packets that the other kernel has acknowledged, in order or not.
_NBYTES, _SND_MSS, _MIN_RTT, _DELIVERED, _UNMEASURED = 196, 16, 148, 192, 0xFFFFFFFF


def least_round_trip_s(sock: socket.socket) -> float:
    """Return the least round trip of a connection in seconds; 0 if it is not TCP, or the kernel does not say."""
    least_us = _value(sock, _MIN_RTT)
    return 0.0 if least_us == _UNMEASURED else least_us / 1e6


def delivered_nbytes(socks: Iterable[socket.socket]) -> int:
    """Return about how many bytes connections have delivered; 0 if they are not TCP, or the kernel does not say."""
    return sum(_value(sock, _SND_MSS) * _value(sock, _DELIVERED) for sock in socks)


def _value(sock: socket.socket, place: int) -> int:
    if sock.family != socket.AF_UNIX:
        with contextlib.suppress(OSError, struct.error):
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _NBYTES)
            return int(struct.unpack_from("I", info, place)[0])
    return 0
