"""Runs `examples/swarm.py` in three processes, of which one is killed and one begins later."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support.deadlines import DEADLINE_S, eventually
from support.ports import free_port

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "swarm.py"


def test_the_example_trains_on_while_a_process_is_killed_and_another_begins(tmp_path: Path) -> None:
    with open(os.open(tmp_path / "key", os.O_WRONLY | os.O_CREAT, 0o600), "wb") as key:
        key.write(os.urandom(32))
    environ = {**os.environ, "UNISONO_KEY_FILE": str(tmp_path / "key"), "UNISONO_HEARTBEAT_TIMEOUT_S": "6"}
    place = f"tcp://127.0.0.1:{free_port()}"
    outputs = [tmp_path / f"output {number}" for number in range(3)]
    processes = []

    def start(number: int, *more: str) -> None:
        command = [sys.executable, str(EXAMPLE), "--place", place, "--seconds", "0.02", *more]
        with open(outputs[number], "w") as output:
            processes.append(subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT))

    def contributors(number: int) -> int:
        lines = re.findall(r"^step .* of (.*)$", outputs[number].read_text(), re.MULTILINE)
        return len(lines[-1].split(", ")) if lines else 0

    try:
        steps = ["--steps", "2000"]
        start(0, *steps, "--checkpoint", str(tmp_path / "checkpoint.npz"))
        start(1, *steps)
        assert eventually(lambda: contributors(0) == 2 == contributors(1)), outputs[0].read_text()
        processes[0].kill()  # it serves the meeting place
        assert eventually(lambda: contributors(1) == 1), outputs[1].read_text()
        start(2, *steps, "--checkpoint", str(tmp_path / "checkpoint.npz"))
        assert eventually(lambda: contributors(1) == 2 == contributors(2)), outputs[2].read_text()
        (loss,) = re.findall(r"loss ([\d.]+)", outputs[2].read_text())[-1:]
        assert float(loss) < 1.0
    finally:
        for process in processes:
            process.kill()
            process.wait(DEADLINE_S)
