"""Runs `examples/swarm.py` in processes that are killed, interrupted, and begin later."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from support.deadlines import DEADLINE_S, eventually
from support.ports import free_port

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "swarm.py"


def test_the_example_trains_on_while_processes_are_killed_begin_and_resume_from_a_checkpoint(tmp_path: Path) -> None:
    with open(os.open(tmp_path / "key", os.O_WRONLY | os.O_CREAT, 0o600), "wb") as key:
        key.write(os.urandom(32))
    environ = {**os.environ, "UNISONO_KEY_FILE": str(tmp_path / "key"), "UNISONO_HEARTBEAT_TIMEOUT_S": "6"}
    place = f"tcp://127.0.0.1:{free_port()}"
    outputs = [tmp_path / f"output {number}" for number in range(4)]
    processes = []

    def start(number: int, *more: str) -> None:
        command = [sys.executable, str(EXAMPLE), "--place", place, "--inner-steps", "10", *more]
        with open(outputs[number], "w") as output:
            processes.append(subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT))

    def contributors(number: int) -> int:
        lines = re.findall(r"^step .* of (.*)$", outputs[number].read_text(), re.MULTILINE)
        return len(lines[-1].split(", ")) if lines else 0

    def losses(number: int) -> list[float]:
        return [float(loss) for loss in re.findall(r"loss ([\d.]+)", outputs[number].read_text())]

    try:
        steps = ["--steps", "100000"]
        checkpoint = ["--checkpoint", str(tmp_path / "checkpoint")]
        start(0, *steps, *checkpoint)
        start(1, *steps)
        assert eventually(lambda: contributors(0) == 2 == contributors(1)), outputs[0].read_text()
        processes[0].kill()  # it serves the meeting place
        assert eventually(lambda: contributors(1) == 1), outputs[1].read_text()
        start(2, *steps, *checkpoint)
        assert eventually(lambda: contributors(1) == 2 == contributors(2)), outputs[2].read_text()
        assert eventually(lambda: losses(2)[-1] < losses(0)[0] / 2), outputs[2].read_text()
        processes[1].send_signal(signal.SIGSTOP)
        assert eventually(lambda: contributors(2) == 1), outputs[2].read_text()
        processes[1].send_signal(signal.SIGCONT)
        assert eventually(lambda: contributors(2) == 2), outputs[1].read_text()
        for number in (1, 2):
            processes[number].send_signal(signal.SIGINT)
            assert processes[number].wait(DEADLINE_S) == 0, outputs[number].read_text()
            assert outputs[number].read_text().endswith("this process has left the swarm\n")
        # All are gone. One that begins with the checkpoint goes on from its step.
        start(3, *steps, *checkpoint)
        assert eventually(lambda: contributors(3) == 1), outputs[3].read_text()
        last = int(re.findall(r"step (\d+)", outputs[2].read_text())[-1])
        (begun,) = re.findall(r"step (\d+): this process begins", outputs[3].read_text())
        assert 0 < last - 10 <= int(begun) <= last + 10, last
    finally:
        for process in processes:
            process.kill()
            process.wait(DEADLINE_S)
