"""Files that commands write are checked before the work, so that no result is lost."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from unisono.cli.main import main

MEASURING = "bench allreduce --sizes 8 --rounds 1 --seconds 0.01"


@pytest.mark.parametrize("option", ["--html", "--out"])
@pytest.mark.parametrize("command", [MEASURING, "tune", "postmortem .", "show allreduce ring", "trace merge ."])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    command: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"tune": "--out", "show allreduce ring": "--svg", "trace merge .": "--output", "postmortem .": "--html"}
    monkeypatch.chdir(tmp_path)
    assert main([*command.split(), options.get(command, option), "none/file"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"there is no folder '{tmp_path}/none'" in shown.err


def test_an_empty_name_of_a_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "allreduce", "ring", "-n", "2", "--out", ""]) == 2
    assert "the name of the file is empty" in capsys.readouterr().err


def test_a_page_without_matplotlib_is_refused_before_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([*MEASURING.split(), "--html", str(tmp_path / "page.html")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "it needs matplotlib" in shown.err
