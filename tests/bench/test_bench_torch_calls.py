"""The benchmark of torch's calls: it measures each call over both backends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S


@pytest.mark.night
def test_benchmark_of_torch_calls_measures_every_call_over_both_backends(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="make torch installs it")
    command = [sys.executable, "-m", "unisono.bench.programs.torch_calls", "--rounds", "1", "--json"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    document = json.loads(process.stdout)
    assert document["ranks"] == 2
    assert {"all_reduce, 8 KiB of bfloat16", "all_reduce, 32 MiB of bfloat16", "barrier"} <= document["rows"].keys()
    for times in document["rows"].values():
        assert min(times["gloo"], times["unisono"]) > 0
