"""Lists the TCP ports on which this process listens, whichever library opened them."""

from __future__ import annotations

import contextlib
import os
import socket
import sys

# The state of a listening socket in the kernel's tables.
_LISTENS = "0A"
_TABLES = {"/proc/self/net/tcp": socket.AF_INET, "/proc/self/net/tcp6": socket.AF_INET6}


def listening() -> frozenset[str]:
    """Return the addresses on which a socket of this process listens for TCP: ``127.0.0.1:80`` or ``[::1]:80``."""
    inodes = set(_inodes_of_sockets())
    return frozenset(
        address for path, family in _TABLES.items() for address, inode in _listeners(path, family) if inode in inodes
    )


def _inodes_of_sockets() -> list[str]:
    inodes = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the folder itself is closed by now
            kind, _, inode = os.readlink(f"/proc/self/fd/{descriptor}").partition(":")
            if kind == "socket":
                inodes.append(inode.strip("[]"))
    return inodes


def _listeners(path: str, family: socket.AddressFamily) -> list[tuple[str, str]]:
    """Return address and inode of all listening sockets in a table of the kernel; none if the table does not exist."""
    try:
        with open(path, encoding="ascii") as file:
            rows = [line.split() for line in file.readlines()[1:]]
    except FileNotFoundError:
        return []
    return [(_shown(row[1], family), row[9]) for row in rows if row[3] == _LISTENS]


def _shown(address: str, family: socket.AddressFamily) -> str:
    """Return an address in its usual form. The kernel writes its 32-bit words in the byte order of this machine."""
    words, port = address.split(":")
    numbers = [int(words[start : start + 8], 16) for start in range(0, len(words), 8)]
    host = socket.inet_ntop(family, b"".join(number.to_bytes(4, sys.byteorder) for number in numbers))
    return f"{host}:{int(port, 16)}" if family == socket.AF_INET else f"[{host}]:{int(port, 16)}"
