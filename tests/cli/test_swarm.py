"""Tests `unisono swarm serve`, which serves a meeting place until a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from support.deadlines import DEADLINE_S

import unisono as un


def test_swarm_serve_serves_a_meeting_place_until_a_signal(tmp_path: Path) -> None:
    key = os.urandom(32)
    with open(os.open(tmp_path / "key", os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.write(key)
    command = [sys.executable, "-m", "unisono", "swarm", "serve", "tcp://127.0.0.1:0"]
    environ = {**os.environ, "UNISONO_KEY_FILE": str(tmp_path / "key")}
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert line.startswith("unisono: a meeting place is served at tcp://127.0.0.1:")
            with un.Swarm(line.split()[-1], key=key, heartbeat_timeout_s=0.5) as swarm:
                assert swarm.size == 1
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()


def test_swarm_serve_without_a_key_says_how_to_make_one() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "UNISONO_KEY_FILE"}
    command = [sys.executable, "-m", "unisono", "swarm", "serve", "tcp://127.0.0.1:0"]
    completed = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert completed.returncode != 0
    assert "a swarm needs the key of its job" in completed.stderr
