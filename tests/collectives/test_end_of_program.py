"""Daemon threads that are inside a call when the program ends: the exit code is kept, and no rank dies of a signal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.deadlines import DEADLINE_S

PROGRAM = """
import sys, threading
import numpy as np
import unisono as un

def call(kind):
    while True:
        if kind == "recv":
            other.recv(np.empty(1), 1 - other.rank)
        elif kind == "wait":
            other.allreduce(small, wait=False).wait()
        elif kind == "callback":
            other.allreduce(small, wait=False).add_done_callback(lambda work: None)
            other.barrier()
        else:
            other.allreduce(large if kind == "large" else small)

kind = sys.argv[1]
world = un.init()
other = world.dup()
small, large = np.ones(10), np.ones(1 << 20)
threading.Thread(target=call, args=(kind,), daemon=True).start()
for _ in range(20):
    world.allreduce(small)
sys.exit(3)
"""
KINDS = ("small", "large", "recv", "wait", "callback")


def test_exit_code_is_kept_when_threads_are_inside_calls(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "unisono", "run", "-n", "2", "program.py"]
    jobs = {
        (kind, turn): subprocess.Popen(
            [*command, kind], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for kind in KINDS
        for turn in range(3)
    }
    try:
        ends = {key: (job.communicate(timeout=DEADLINE_S)[1], job.returncode) for key, job in jobs.items()}
    finally:
        for job in jobs.values():
            job.kill()
            job.wait()
    assert {key: code for key, (_, code) in ends.items() if code != 3} == {}, ends
    assert [errors for errors, _ in ends.values() if "terminate called" in errors] == []
