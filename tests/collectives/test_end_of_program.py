"""Daemon threads that are inside a call when the program ends: the exit code is kept, and no rank dies of a signal."""

from __future__ import annotations

import sys
from pathlib import Path

from support.programs import completed

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
    jobs = [(kind, turn) for kind in KINDS for turn in range(3)]
    ends = dict(zip(jobs, completed([[*command, kind] for kind, _ in jobs], folder=tmp_path), strict=True))
    assert {job: end.returncode for job, end in ends.items() if end.returncode != 3} == {}, ends
    assert [end.stderr for end in ends.values() if "terminate called" in end.stderr] == []
