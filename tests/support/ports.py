"""Free ports for jobs whose ranks are started with the port of rank 0."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000
_ATTEMPTS = 100


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of `host` on which no process listens.

    If possible, the port is not one of the ephemeral ports that the kernel assigns by itself. Otherwise the kernel
    could assign it to a concurrent test before the rank listens there.
    """
    ports = range(_LOWEST, int(_EPHEMERAL_PORTS.read_text().split()[0])) or range(_LOWEST, 1 << 16)
    for _ in range(_ATTEMPTS):
        port = random.SystemRandom().choice(ports)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError(f"{host} has no port left in {ports}")
