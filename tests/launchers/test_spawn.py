"""`un.spawn`: a job that starts another one and meets it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.programs import by_launcher

import unisono as un

CHILD = r"""
import sys
import numpy as np
import unisono as un

world = un.init()
if sys.argv[1] == "meet":
    with un.parent() as bridge:
        total = bridge.union.allreduce(np.ones(2)).tolist()
        sys.stdout.write(f"child {world.rank} {bridge.own} {bridge.remote} {total}\n")
sys.exit(int(sys.argv[2]))
"""
PARENT = r"""
import sys

import numpy as np
import unisono as un

world = un.init()
assert un.parent() is None
with un.spawn(["child.py", "meet", "0"], 3) as bridge:
    total = bridge.union.allreduce(np.ones(2)).tolist()
    # In one piece, because both jobs write to one pipe.
    sys.stdout.write(f"parent {world.rank} {bridge.own} {bridge.remote} {total}\n")
for command in (["child.py", "leave", "5"], ["child.py", "leave", "0"], ["missing.py"]):
    try:
        un.spawn(command, 1)
    except un.RendezvousError as error:
        sys.stdout.write(f"{world.rank} {error.message}\n")
assert world.allreduce(np.array(1)) == 2
"""


def test_job_spawns_jobs_and_meets_those_that_call_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.chdir(tmp_path)
    job = by_launcher(PARENT, tmp_path)
    assert job.returncode == 0, job.stderr
    lines = job.stdout.splitlines()
    for rank in range(2):
        assert f"[{rank}] parent {rank} (0, 1) (2, 3, 4) [5.0, 5.0]" in lines
        said = [line for line in lines if line.startswith(f"[{rank}] {rank} ")]
        assert ["exit code 5" in said[0], "exit code 0" in said[1], "exit code 2" in said[2]] == [True] * 3
        assert all("before it called unisono.parent()" in line for line in said)
    for rank in range(3):
        assert f"[0] [{rank}] child {rank} (2, 3, 4) (0, 1) [5.0, 5.0]" in lines


@pytest.mark.parametrize(
    ("command", "ranks", "text"),
    [
        ("child.py", 1, "command must be a list of texts"),
        ([], 1, "command must be a list of texts"),
        (["child.py", 1], 1, "command must be a list of texts"),
        (["child.py"], 0, "ranks must be a number of ranks, at least 1"),
        (["child.py"], True, "ranks must be a number of ranks, at least 1"),
    ],
)
def test_wrong_spawn_is_refused_before_anything_starts(command: list[str], ranks: int, text: str) -> None:
    with un.init() as world, pytest.raises(un.UsageError, match=text):
        un.spawn(command, ranks, world)
