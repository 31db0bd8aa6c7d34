"""A Redis server of its own for a test."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S
from support.ports import free_port


@contextlib.contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Start a server that keeps nothing on disk; yield its port and process once it answers."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("make debian installs redis-server")
    port = free_port()
    words = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *options)
    with subprocess.Popen([program, *words], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            deadline = time.monotonic() + DEADLINE_S
            for line in process.stdout:
                if b"Ready to accept connections" in line:
                    break
                assert time.monotonic() < deadline
            yield port, process
        finally:
            process.kill()
