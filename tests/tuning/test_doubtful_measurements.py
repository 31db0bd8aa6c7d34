"""Doubtful measurements in ``unisono calibrate`` and ``unisono tune``: refusal, warning and repetition."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.measured_times import HERE, measurement_of

import unisono as un
from unisono.cli.commands import calibrate, explain, tune
from unisono.cli.commands.calibrate import PredictedCall
from unisono.tuning.decide.table import loaded
from unisono.tuning.machine.fingerprint import fingerprint
from unisono.tuning.machine.parameters import PRIORS, Parameters, curve
from unisono.tuning.measure import calibration_files
from unisono.tuning.measure.measurement_log import MeasurementStore

# A measured link, and two checks of its model: one with a small error, and one with a large error.
SHM = PRIORS.links["shm"]._replace(step=curve([(8, 1e-6), (1 << 20, 1e-4)]))
MEASURED = PRIORS._replace(links={**PRIORS.links, "shm": SHM})
GOOD = PredictedCall("allgather", "ring", 64, 1.5e-6, 1e-6)
WRONG = PredictedCall("allreduce", "recursive_doubling", 64, 5e-6, 600e-6)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run_calibrate(monkeypatch: pytest.MonkeyPatch, checks: Sequence[PredictedCall], *arguments: str) -> Result:
    """Run ``unisono calibrate`` on ranks whose measurement is `MEASURED`, and whose checks have these results."""

    def measure(comm: un.Communicator, known: Parameters, short: bool) -> tuple[Parameters, list[PredictedCall]]:
        return MEASURED, list(checks)

    monkeypatch.setattr(calibrate, "measure", measure)
    return CliRunner().invoke(calibrate.command, ["--transports", "shm", *arguments], standalone_mode=False)


def test_calibration_that_fails_its_check_is_kept_only_when_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    completed = run_calibrate(monkeypatch, [GOOD, WRONG])
    assert completed.return_value == 1
    assert "the calibration of 2 ranks by shm is not kept: its model is off by a factor of 120" in completed.stderr
    assert "allreduce recursive_doubling of 64 B: predicted 5.0 µs, measured 600.0" in completed.stderr
    assert "load" in completed.stderr
    assert calibration_files.read(fingerprint()) is None

    assert run_calibrate(monkeypatch, [GOOD, WRONG], "--force").return_value == 0
    kept = calibration_files.read(fingerprint())
    assert kept is not None
    assert kept.parameters == MEASURED
    assert kept.origins["shm"].worst_factor == pytest.approx(120)


def test_calibration_that_passes_its_check_is_listed_used_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_calibrate(monkeypatch, [GOOD]).return_value == 0
    shown = CliRunner().invoke(calibrate.command, ["show"]).output
    assert f"{fingerprint()} (this machine)" in shown
    assert "1.5×" in shown
    explained = CliRunner().invoke(explain.command, ["allreduce", "64"]).output
    assert "predicted by the calibration of shm on this machine (20" in explained
    by_tcp = CliRunner().invoke(explain.command, ["allreduce", "64", "--link", "tcp", "--json"]).output
    assert json.loads(by_tcp)["source"].startswith("predicted with default costs: tcp is not calibrated")

    assert "removed" in CliRunner().invoke(calibrate.command, ["forget"]).output
    assert "no calibration of this machine" in CliRunner().invoke(calibrate.command, ["show"]).output
    again = CliRunner().invoke(calibrate.command, ["forget"])
    assert isinstance(again.exception, un.UsageError)


@pytest.mark.parametrize("about", [3, {"links": 3}, {"links": {"shm": 3}}, {"machine": 3}])
def test_calibration_file_with_wrong_origin_is_named_and_not_used(about: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run_calibrate(monkeypatch, [GOOD])
    path = Path(calibration_files.path_of(fingerprint()))
    path.write_text(json.dumps({**json.loads(path.read_text()), "about": about}))
    assert calibration_files.calibrated(fingerprint()) is None
    completed = CliRunner().invoke(calibrate.command, ["show"])
    assert f"{path} is not used: the field 'about'" in completed.stderr


def test_calibration_file_without_origin_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    run_calibrate(monkeypatch, [GOOD])
    path = Path(calibration_files.path_of(fingerprint()))
    content = json.loads(path.read_text())
    del content["about"]
    path.write_text(json.dumps(content))
    assert calibration_files.calibrated(fingerprint()) == MEASURED
    assert "unknown" in CliRunner().invoke(calibrate.command, ["show"]).output


# --- tables ----------------------------------------------------------------------------------------------------------

THERE = HERE._replace(ranks=2, ranks_per_host=2)
# An impossible measurement: 32 B take 1216 µs, although 8 B and 128 B take 1.4 and 2 µs.
BEFORE = [measurement_of("ring", nbytes, us, THERE) for nbytes, us in ((8, 1.4), (32, 1216.0), (128, 2.0))]


def run_tune(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> Result:
    """Run ``unisono tune`` on ranks that measure 1.5 µs at each point whose measurement is repeated."""

    def measure(comm: un.Communicator, request: tune.TuneRequest, observe: object = None) -> list[tuple[str, int]]:
        if comm.rank == 0:
            again = [
                measurement_of("ring", nbytes, 1.5, context)._replace(load=0.2) for context, nbytes in request.again
            ]
            MeasurementStore(Path(request.store)).append(again)
        return [("broadcast", 8), ("broadcast", 4096), ("allreduce", 1 << 20)]

    monkeypatch.setattr(tune, "measure", measure)
    options = ["-n", "2", "--collectives", "allreduce", "--sizes", "8:512", "--out", str(out)]
    return CliRunner().invoke(tune.command, [*options, *arguments], standalone_mode=False)


def test_tune_lists_suspicious_times_and_omitted_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MeasurementStore(tmp_path / "t.jsonl").append(BEFORE)
    completed = run_tune(monkeypatch, tmp_path / "t.json")
    assert "suspicious: allreduce, 2 ranks by shm: 32 B take 608.00 times as long as 128 B" in completed.stderr
    assert "--again suspicious" in completed.stderr
    assert "among 2 ranks: broadcast of 8 B, 4 KiB; allreduce of 1 MiB" in completed.stderr
    assert "t.json is not written, because such times cannot be right" in completed.stderr
    assert (completed.return_value, (tmp_path / "t.json").exists()) == (1, False)
    forced = run_tune(monkeypatch, tmp_path / "t.json", "--force")
    assert (forced.return_value, (tmp_path / "t.json").exists()) == (0, True)


@pytest.mark.parametrize(("mode", "replaced"), [("suspicious", {32, 128}), ("all", {8, 32, 128})])
def test_tune_again_replaces_measurements(
    mode: str, replaced: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, others = (
        MeasurementStore(tmp_path / "t.jsonl"),
        [measurement_of("ring", 32, 1000.0), measurement_of("ring", 1 << 20, 5000.0, THERE)],
    )
    store.append([*BEFORE, *others])
    store.path.write_text(store.path.read_text() + "a line of another format\n")
    completed = run_tune(monkeypatch, tmp_path / "t.json", "--again", mode)
    assert "suspicious: allreduce, 2 ranks" not in completed.stderr
    times = {measurement.nbytes: measurement.median_s for measurement in store.read() if measurement.context == THERE}
    assert {nbytes for nbytes, seconds in times.items() if seconds == 1.5e-6} == replaced
    assert len(store.read()) == len(BEFORE) + len(others)
    assert "a line of another format" in store.path.read_text()
    title = CliRunner().invoke(tune.command, ["show", str(tmp_path / "t.json")]).output
    assert "at a load of 0.2" in title
    assert loaded(tmp_path / "t.json").machines["here"]["load"] == [0.2, 0.2]


def test_table_shows_whole_names_on_a_narrow_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("unisono.cli.output.terminal._WIDTH_OF_PIPE", 60)
    MeasurementStore(tmp_path / "t.jsonl").append([measurement_of("ring(segment_nbytes=65536)", 8, 1.0)])
    assert "ring(segment_nbytes=65536)" in run_tune(monkeypatch, tmp_path / "t.json").stdout
