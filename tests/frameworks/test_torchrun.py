"""Ranks that torchrun starts, or that are told torch's variables alone: what they say, and torch's stores, for real."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S
from support.ports import free_port
from support.programs import by_variables
from support.torch_ranks import PROGRAMS
from support.torchrun import torchrun

pytest.importorskip("torch.distributed", reason="make torch installs what these tests need")

# A process group of torch before, and one after it at the same port.
WITH_TORCH = """
import datetime, sys
import numpy as np
import torch.distributed as dist
import unisono as un

def reduce():
    with un.init() as world:
        assert world.allreduce(np.arange(4) + world.rank).tolist() == [1, 3, 5, 7]

def group():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=90))

for step in sys.argv[1:]:
    {"reduce": reduce, "group": group, "destroy": dist.destroy_process_group}[step]()
"""

PROGRAM = """
import pathlib
import numpy as np
import unisono as un

for meeting in range(2):
    with un.init() as world:
        total = world.allreduce(np.arange(4) + world.rank)
        pathlib.Path(f"{meeting}-{world.rank}-of-{world.size}").write_text(str(total.tolist()))
"""


def test_ranks_of_torchrun_can_rendezvous_twice_and_allreduce(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for meeting in range(2):
        for rank in range(2):
            assert (tmp_path / f"{meeting}-{rank}-of-2").read_text() == "[1, 3, 5, 7]"


@pytest.mark.parametrize("steps", ["reduce group reduce destroy reduce", "group reduce reduce destroy"])
def test_init_works_before_and_beside_a_torch_process_group(tmp_path: Path, steps: str) -> None:
    port = free_port()
    for process in by_variables(WITH_TORCH, *steps.split(), port=port, folder=tmp_path):
        assert (process.returncode, process.stderr) == (0, "")


@pytest.mark.parametrize(
    ("way", "death", "agents"), [("backend", "late", 2), ("init", "late", 1), ("init", "early", 2)]
)
def test_ranks_meet_again_after_torchrun_has_restarted_them(tmp_path: Path, way: str, death: str, agents: int) -> None:
    reports = torchrun(PROGRAMS / "restarted.py", tmp_path, way, death, ranks=2, agents=agents, restarts=1).reports
    size = 2 * agents
    first, step = sum(range(size)), size
    assert [one["losses"] for one in reports] == [[first + step * i for i in range(6)]] * size
    assert reports[1]["restarts"] == 1
    errors = {path.name: path.read_text() for path in tmp_path.glob("error-*")}
    survivors = [rank for rank in range(size) if rank != 1] if death == "late" else []
    assert sorted(errors) == [f"error-{rank}" for rank in survivors]
    assert all("rank 1 " in text for text in errors.values()), errors
