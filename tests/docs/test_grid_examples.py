"""Runs the examples of grids, which compare their results with those of one rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    ("example", "text"),
    [
        ("heat.py", "2 × 2 × 1 ranks, 50 steps: the same bits"),
        ("conjugate_gradients.py", "2 × 2 ranks, 170 steps: the direct solution"),
    ],
)
def test_example_on_a_grid_has_the_result_of_one_rank(example: str, text: str) -> None:
    command = [sys.executable, "-m", "unisono", "run", "-n", "4", str(EXAMPLES / example)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (process.returncode, text in process.stdout) == (0, True), process.stderr
