"""The measurement of the time in which ranks start and meet."""

from __future__ import annotations

import json
import subprocess
import sys

from support.deadlines import DEADLINE_S

COMMAND = [sys.executable, "-m", "unisono.bench.programs.bootstrap"]


def test_bootstrap_benchmark_measures_real_processes() -> None:
    command = [*COMMAND, "--ranks", "1,3", "--stores", "tcp,file", "--repeats", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    rows = json.loads(done.stdout)
    assert [(row["store"], row["ranks"]) for row in rows] == [("tcp", 1), ("file", 1), ("tcp", 3), ("file", 3)]
    for row in rows:
        assert row["init_s"] > 0
        assert row["barrier_s"] > 0
        assert row["cpu_s"] > 0
        assert row["resident_mib"] > 1


def test_bootstrap_benchmark_refuses_invalid_numbers_of_ranks() -> None:
    done = subprocess.run(
        [*COMMAND, "--ranks", "many"], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 2
    assert "--ranks" in done.stderr
    assert "Traceback" not in done.stderr
