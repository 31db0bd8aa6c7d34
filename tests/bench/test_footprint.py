"""The study of what a rank of a large host holds: its rows, on a few ranks."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S

from unisono.bench.studies.footprint import own_kib


def test_own_memory_grows_by_memory_that_is_written() -> None:
    nbytes = 8 << 20
    before = own_kib()
    with mmap.mmap(-1, nbytes) as memory:
        memory.write(b"x" * nbytes)
        assert own_kib() - before >= nbytes >> 11


@pytest.mark.night
def test_study_of_footprints_has_the_median_and_the_largest_rank(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "unisono.bench.studies.footprint", "--ranks", "3", "--json"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    rows = {row["after"]: row for row in json.loads(process.stdout)}
    assert rows["init"]["ranks"] == 3
    for kind in ("median", "largest"):
        assert all(
            before <= after for before, after in zip(rows["init"][kind][1:], rows["barrier"][kind][1:], strict=True)
        )
    assert rows["alltoall of 8 B to each"]["median"][2] > rows["barrier"]["median"][2] > 0
