"""The benchmark of calls in programs of JAX: it measures the libraries of this environment, and its statistics."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.deadlines import DEADLINE_S

from unisono.bench.adapters.jax_programs import calls_of
from unisono.bench.driver import Results, Sample
from unisono.bench.programs.jax_calls import times_of
from unisono.transports.host.core_distance import CorePlacement


def test_times_are_of_one_call_of_a_program() -> None:
    placement = CorePlacement("core", None)
    programs = {(8, 0): [1000.0, 3000.0, 2000.0], (8, 1): [4000.0], (64 << 20, 0): [70.0]}
    samples = [Sample(nbytes, "gloo", number, placement, np.array(us)) for (nbytes, number), us in programs.items()]
    first, second = (us / calls_of(8) for us in (2000.0, 4000.0))
    assert times_of(Results(samples)) == {
        "8 B": {"gloo": {"median": (first + second) / 2, "best": first}},
        "64 MiB": {"gloo": {"median": 70.0, "best": 70.0}},
    }


@pytest.mark.night
def test_benchmark_of_jax_measures_programs(tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="make jax installs it")
    options = "--libraries jax-xla-unisono --sizes 1K --rounds 1 --seconds 0.01 --json"
    command = [sys.executable, "-m", "unisono.bench.programs.jax_calls", *options.split()]
    process = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["rows"]["1 KiB"]["jax-xla-unisono"]["best"] > 0
