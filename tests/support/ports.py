"""Ports that ranks agree on before one of them listens there."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000
_ATTEMPTS = 100


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of `host` on which nobody listens.

    It is none of those that the kernel hands out by itself, if there are others: whoever connects or listens anywhere
    on the machine, as the tests beside this one do all the time, could be given such a one before the rank comes.
    """
    ports = range(_LOWEST, int(_HANDED_OUT.read_text().split()[0])) or range(_LOWEST, 1 << 16)
    for _ in range(_ATTEMPTS):
        port = random.SystemRandom().choice(ports)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError(f"{host} has no port left in {ports}")
