"""The study of sums of sparse vectors: it counts the bytes that ranks receive."""

from __future__ import annotations

import json

import pytest

from unisono.bench.studies import sparse_sums
from unisono.bench.studies.sparse_sums import Data, received


def test_bytes_are_those_of_equal_and_of_different_rows() -> None:
    full = Data("full", 64, 64, 1)
    assert received(full, 4) == {
        "gathering": 3 * 64 * 12,
        "doubling": 2 * (8 + 64 * 4 + 8),
        "splitting": 3 * 16 * 8 + 198,
    }
    one = Data("one", 1 << 20, 1, 1)
    assert received(one, 2) == {"gathering": 12, "doubling": 16, "splitting": 16}


def test_study_prints_a_row_for_each_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sparse_sums, "DATA", (Data("few", 50, 5, 2, 1.0),))
    monkeypatch.setattr(sparse_sums, "TIMED_RANKS", (2,))
    assert sparse_sums.main(["--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["ranks"] for row in rows] == [4, 8, 16, 64, 2]
    assert all(row["splitting"] > 0 for row in rows[:4])
    assert min(rows[4]["gathering_s"], rows[4]["sparse_sums_s"]) > 0
