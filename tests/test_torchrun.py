"""Ranks that torchrun starts: the environment that it sets and the store that it serves, for real."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import DEADLINE_S

pytest.importorskip("torch.distributed", reason="make torch installs what these tests need")

PROGRAM = """
import pathlib
import numpy as np
import unisono as un

for meeting in range(2):
    with un.init() as world:
        total = world.allreduce(np.arange(4) + world.rank)
        pathlib.Path(f"{meeting}-{world.rank}-of-{world.size}").write_text(str(total.tolist()))
"""


def test_ranks_of_torchrun_meet_twice_and_reduce(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for meeting in range(2):
        for rank in range(2):
            assert (tmp_path / f"{meeting}-{rank}-of-2").read_text() == "[1, 3, 5, 7]"
