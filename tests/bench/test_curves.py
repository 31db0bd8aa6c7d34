"""Curves of saved benchmarks: which benchmark is drawn, and what the picture contains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.deadlines import DEADLINE_S

pytest.importorskip("matplotlib")
from unisono.bench import curves

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results" / "allreduce.jsonl"
SIZES = (8, 64, 512, 4096)


def row(nbytes: int, library: str, placement: str, time_us: float | None) -> dict[str, Any]:
    facts = {"nbytes": nbytes, "library": library, "placement": placement, "median_us": time_us}
    return {**facts, "latency_ns": 50.0, "busbw": nbytes / 1e3}


def save(path: Path, *documents: tuple[str, list[dict[str, Any]]]) -> Path:
    """Write documents, each given by its date and its rows."""
    common = {"machine": {"cpu": "Some(R) CPU"}, "collective": "allreduce", "dtype": "float32", "ranks": 2}
    path.write_text("".join(json.dumps({**common, "date": date, "rows": rows}) + "\n" for date, rows in documents))
    return path


def test_newest_benchmark_with_all_libraries_and_many_sizes_is_drawn(tmp_path: Path) -> None:
    both = [row(size, name, "near", 1.0) for size in SIZES for name in ("unisono-shm", "gloo")]
    alone = [row(size, "unisono-shm", "near", 1.0) for size in SIZES]
    few = [row(8, name, "near", 1.0) for name in ("unisono-shm", "gloo")]
    failed = [*alone, *(row(size, "gloo", "near", None) for size in SIZES)]
    path = save(tmp_path / "results.jsonl", ("1", both), ("2", both), ("3", alone), ("4", few), ("5", failed))
    assert curves.newest(path, ["unisono-shm", "gloo"]).document["date"] == "2"
    assert curves.newest(path, ["unisono-shm"]).document["date"] == "5"
    with pytest.raises(LookupError, match="no benchmark of mpich at 4 sizes or more"):
        curves.newest(path, ["mpich"])
    with pytest.raises(LookupError):
        curves.newest(path, ["gloo"], cpu="Other")


def test_placements_are_not_mixed(tmp_path: Path) -> None:
    rows = [
        row(size, "unisono-shm", placement, time) for size in SIZES for placement, time in (("far", 2.0), ("near", 1.0))
    ]
    far, near = curves.saved(save(tmp_path / "results.jsonl", ("2026-11-27T01", rows)))
    assert (set(far.times("unisono-shm").values()), set(near.times("unisono-shm").values())) == ({2.0}, {1.0})
    assert near.title == "allreduce of float32, 2 ranks, Some CPU, near cores (50–50 ns), 2026-11-27"


def test_newest_comparison_of_each_situation_counts(tmp_path: Path) -> None:
    def compared(library: str, ratio: float) -> dict[str, Any]:
        ratios = {"unisono-shm": {"value": ratio, "low": ratio - 0.1, "high": ratio + 0.1}}
        return {**row(8, library, "near", 1.0), "ratios": ratios}

    old = [compared("gloo", 2.0), compared("mpich", 3.0), compared("bare-copy", 0.5), compared("unisono-tcp", 0.5)]
    first = save(tmp_path / "first.jsonl", ("2026-11-27T01", old))
    second = save(tmp_path / "second.jsonl", ("2026-11-28T01", [compared("gloo", 0.8)]))
    result = {
        comparison.library: (comparison.date, round(comparison.high, 3))
        for comparison in curves.comparisons([second, first])
    }
    assert result == {"gloo": ("2026-11-28", 0.9), "mpich": ("2026-11-27", 3.1)}


def test_command_draws_each_library_into_an_svg(tmp_path: Path) -> None:
    svg = tmp_path / "allreduce.svg"
    command = [sys.executable, "-m", "unisono.bench.curves", RESULTS, "--against", "gloo,openmpi", "--svg", svg]
    subprocess.run(command, check=True, timeout=DEADLINE_S, cwd=tmp_path)
    text = svg.read_text()
    assert all(f">{curves.LINES[name].label}<" in text for name in ("unisono-shm", "gloo", "openmpi"))
