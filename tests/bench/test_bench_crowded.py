"""The benchmark of crowded cores: its situations, its ratios, and a measurement beside a busy process."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S

from unisono.bench.programs.crowded import OURS, Row, Situation, busy_processes


def test_situation_is_ranks_and_busy_processes() -> None:
    assert Situation.parsed("4") == (4, 0)
    assert Situation.parsed("2+14") == (2, 14)
    assert str(Situation(2, 14)) == "2 ranks and 14 busy processes"


@pytest.mark.parametrize("text", ["", "0", "+3", "2+", "2+-1", "two", "2+3+4"])
def test_situation_refuses_other_texts(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no situation: write ranks or ranks"):
        Situation.parsed(text)


def test_ratio_above_1_says_that_unisono_is_faster() -> None:
    row = Row(Situation(4, 0), 8, {OURS: [1.0, 2.0], "gloo": [3.0, 6.0]})
    assert row.ratio("gloo") == pytest.approx((3, 3, 3))


def test_busy_processes_end_with_the_block() -> None:
    with busy_processes(2) as processes:
        assert [process.poll() for process in processes] == [None, None]
    assert all(process.returncode is not None for process in processes)


@pytest.mark.night
def test_benchmark_of_crowded_cores_measures_a_situation(tmp_path: Path) -> None:
    options = "--situations 2+1 --sizes 1K --against= --rounds 2 --seconds 0.01 --json"
    command = [sys.executable, "-m", "unisono.bench.programs.crowded", *options.split()]
    process = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    (row,) = json.loads(process.stdout)
    assert (row["collective"], row["ranks"], row["busy"], row["nbytes"]) == ("allreduce", 2, 1, 1024)
    assert len(row["times_us"][OURS]) == 2
