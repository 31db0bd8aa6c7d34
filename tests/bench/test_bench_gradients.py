"""The benchmark of gradients between network namespaces: its output, and the removal of the namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S

from unisono.bench.namespaces import PREFIX, missing
from unisono.bench.programs.gradients import shares

SHORT = {
    "overlap": ("--model", "digits", "--width", "32", "--batch", "64", "--rounds", "2"),
    "lag": ("--delay-ms", "5", "--step-ms", "1", "--lags", "0,1", "--width", "32", "--rounds", "12"),
}


def test_exposed_share_is_relative_to_steps_without_overlap() -> None:
    assert shares({"exposed_ms": {"after": 20.0, "overlapped": 4.0}}) == {"after": 1.0, "overlapped": 0.2}


@pytest.mark.night
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("what", SHORT)
def test_gradients_benchmark_removes_its_namespaces_after_measuring(what: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="pip install --group demo")
    if what == "lag" and not Path("/dev/net/tun").exists():
        pytest.skip("there is no /dev/net/tun")
    output = tmp_path / "found.jsonl"
    command = [sys.executable, "-m", "unisono.bench.programs.gradients", what, *SHORT[what], "--json", str(output)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
    document = json.loads(output.read_text())
    if what == "lag":
        results = document["found"]
        assert results["lag 0"]["steps_per_s"] < 1e3 / 5
        assert all(0 <= row["accuracy"] <= 1 for row in results.values())
    else:
        assert document["found"]["ms"].keys() == {"alone", "after", "overlapped", "float16", "bfloat16", "int8"}
        assert document["found"]["sent_nbytes"]["int8"] < document["found"]["sent_nbytes"]["float16"]
    namespaces = Path("/run/netns")
    assert not namespaces.exists() or not list(namespaces.glob(f"{PREFIX}{process.pid}-*"))
