"""`unisono run --stats`: its summary of real jobs, and the straggler by numbers made by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from support.commands import unisono

from unisono.cli.output.job_statistics import RankStatistics, straggler

PROGRAM = """
import os, signal, sys, time
import numpy as np, unisono as un
world = un.init()
others = world.split(0 if world.rank == 1 else 1)
x = np.ones(1000, np.float32)
others.allreduce(x)
for _ in range(4):
    if world.rank == 1: time.sleep(0.1)
    world.allreduce(x)
if "killed" in sys.argv and world.rank == 1: os.kill(os.getpid(), signal.SIGKILL)
"""


def cells(table: str, rank: int) -> list[str]:
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]
    return next(row for row in rows if row[0] == str(rank))


def test_the_summary_names_the_straggler_and_sums_communicators(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = unisono("run", "--stats", "-n", "3", "program.py", folder=tmp_path)
    assert done.returncode == 0
    first, third = (cells(done.stderr, rank) for rank in (0, 2))
    assert [first[1], third[1]] == ["6", "6"]  # four on the world, one on the others, and that of `split`
    assert first[3].endswith("kB")
    assert "rank 1" in first[6] + third[6]
    assert "unisono: rank 1 is the straggler: the others waited " in done.stderr
    assert "What the ranks" not in unisono("run", "-n", "1", "program.py", folder=tmp_path).stderr


def test_a_killed_rank_reports_nothing_and_the_job_fails_as_without_a_summary(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = unisono("run", "--stats", "-n", "3", "program.py", "killed", folder=tmp_path)
    assert done.returncode == 137
    assert cells(done.stderr, 1)[6] == "ended without a report"
    assert "straggler" not in done.stderr


def rank_that_waited(**seconds: float) -> RankStatistics:
    return RankStatistics(9, 10.0, 0, 0, Counter({int(name[1:]): value for name, value in seconds.items()}))


def test_the_straggler_in_a_ring_is_the_rank_that_does_not_wait() -> None:
    ring = [rank_that_waited(r2=8.0), rank_that_waited(r0=0.1), rank_that_waited(r1=8.1)]
    assert straggler(dict(enumerate(ring))).startswith("rank 1 is the straggler: the others waited 8.1 s for it")
    assert straggler({0: ring[0], 1: None, 2: ring[2]}).startswith("rank 1 is the straggler")


def test_ranks_that_wait_little_or_for_each_other_are_no_stragglers() -> None:
    assert straggler({0: rank_that_waited(r1=5.0), 1: rank_that_waited(r0=5.0)}) == ""
    assert straggler({0: rank_that_waited(r1=0.1), 1: rank_that_waited()}) == ""
    assert straggler({0: rank_that_waited(), 1: None}) == ""
