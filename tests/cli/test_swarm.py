"""Tests `unisono swarm serve`, which serves a meeting place until a signal."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S

import unisono as un
from unisono.cli.main import main


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


@pytest.mark.parametrize(("host", "is_everywhere"), [("127.0.0.1", False), ("0.0.0.0", True), ("a-service", True)])
def test_meeting_place_says_whether_it_listens_on_all_addresses(host: str, is_everywhere: bool) -> None:
    with un.MeetingPlace(f"tcp://{host}:0", bytes(32)) as place:
        assert place.is_everywhere == is_everywhere


def test_address_of_a_meeting_place_that_cannot_be_used_comes_with_advice() -> None:
    with (
        un.MeetingPlace("tcp://127.0.0.1:0", bytes(32)) as place,
        pytest.raises(un.RendezvousError, match="already in use; pass another port"),
    ):
        un.MeetingPlace(place.url, bytes(32))
    with pytest.raises(un.RendezvousError, match="; pass an address of this machine"):
        un.MeetingPlace("tcp://192.0.2.77:0", bytes(32))


def test_server_that_is_no_meeting_place_is_not_called_a_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(un.RendezvousError, match=r"the process at 127.0.0.1 port \d+ did not answer within"):
            un.Swarm(place, key=bytes(32), heartbeat_timeout_s=0.3, rendezvous_timeout_s=2.0)


def test_unknown_subcommand_of_swarm_names_the_only_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swarm", "start"]) == 2
    assert capsys.readouterr().err == "unisono: there is no command 'start'; there is only serve\n"


def test_swarm_serve_without_a_key_says_how_to_make_one() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "UNISONO_KEY_FILE"}
    command = [sys.executable, "-m", "unisono", "swarm", "serve", "tcp://127.0.0.1:0"]
    completed = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert completed.returncode != 0
    assert "a swarm needs the key of its job" in completed.stderr
