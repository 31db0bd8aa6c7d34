"""Two processes and one TCP socket in C: not a library, but the bound for transports over TCP.

The program is compiled on first use, and sums only float32.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEETING_S = 20.0
RETRY_S = 0.01


class BareAdapter:
    """This rank's end of the socket. The variables of `unisono run` say which rank it is."""

    def __init__(self) -> None:
        self.size = int(os.environ["UNISONO_SIZE"])
        if self.size != 2:
            raise NotImplementedError(f"a bare TCP socket connects 2 ranks, not {self.size}")
        self._rank = int(os.environ["UNISONO_RANK"])
        self._socket = _meet(self._rank, f"\0unisono-bare-{os.environ['UNISONO_JOB']}")
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")  # it does not pace
        self._program = _compiled()
        self.version = "bare C, one TCP socket"

    def call(self, collective: str, array: Any, out: Any) -> Callable[[], object]:
        """Return the call to measure."""
        if (collective, array.dtype.name) != ("allreduce", "float32"):
            raise NotImplementedError(
                f"a bare TCP socket carries allreduce of float32 only, not {collective} of {array.dtype}"
            )
        arguments = self._socket.fileno(), self._rank, ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.size)
        return lambda: _check(self._program.bare_allreduce(*arguments))

    def barrier(self) -> None:
        """Wait for the other rank."""
        _check(self._program.bare_barrier(self._socket.fileno()))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def _check(result: int) -> None:
    if result != 0:
        raise ConnectionError("the TCP connection between the two ranks broke during an allreduce")


def _compiled() -> ctypes.CDLL:
    source = Path(__file__).with_suffix(".c")
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        library = Path(folder, "bare.so")
        subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-o", library, source], check=True)
        return ctypes.CDLL(str(library))


def _meet(rank: int, name: str) -> socket.socket:
    """Return a TCP socket to the other rank; rank 0 sends its port over the abstract Unix socket `name`."""
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as port_server:
            port_server.bind(name)
            port_server.listen(1)
            port_server.settimeout(MEETING_S)
            listener.settimeout(MEETING_S)
            with port_server.accept()[0] as connection:
                connection.sendall(f"{listener.getsockname()[1]}\n".encode())
            return listener.accept()[0]
    deadline = time.monotonic() + MEETING_S
    while True:
        with socket.socket(socket.AF_UNIX) as asker:
            try:
                asker.connect(name)
            except ConnectionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)
                continue
            with asker.makefile() as answer:
                return socket.create_connection(("127.0.0.1", int(answer.readline())), MEETING_S)


connect = BareAdapter
