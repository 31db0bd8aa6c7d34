"""Campaigns and calibrations that hang: they end at their time limit, and keep the measurements made so far."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.commands import unisono
from support.deadlines import DEADLINE_S

import unisono as un
from unisono.cli.commands import calibrate, tune
from unisono.tuning.decide.table import loaded
from unisono.tuning.machine.fingerprint import fingerprint
from unisono.tuning.machine.parameters import PRIORS, Parameters
from unisono.tuning.measure.calibration_files import calibrated
from unisono.tuning.measure.measurement_log import Context, Measurement, MeasurementStore, line_of

KEPT = Measurement(Context("here", "allreduce", "shm", "plain", 2, 2), "ring", 8, *[1e-6] * 5, 3)


def keep_and_hang(comm: un.Communicator, request: tune.TuneRequest, observe: object = None) -> list[tuple[str, int]]:
    """Run a campaign that makes one measurement, and then waits for a rank that hangs."""
    if comm.rank == 0:
        MeasurementStore(Path(request.store)).append([KEPT])
    else:
        time.sleep(2 * DEADLINE_S)
    comm.barrier()
    return []


def hang(comm: un.Communicator, known: Parameters, short: bool) -> None:
    time.sleep(2 * DEADLINE_S)


def test_hanging_tune_times_out_and_keeps_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_MARGIN_S", 2.0)
    monkeypatch.setattr(tune, "measure", keep_and_hang)
    result = CliRunner().invoke(tune.command, ["-n", "2", "--budget", "1s", "--out", str(tmp_path / "t.json")])
    assert isinstance(result.exception, un.CollectiveTimeoutError)
    assert "tuning has not ended within 4 s (twice the budget and 2 s): a rank hangs" in str(result.exception)
    assert "rank 1 had not answered" in str(result.exception) or "ranks 0, 1 had not answered" in str(result.exception)
    assert [decision.variant_at(8) for decision in loaded(tmp_path / "t.json").decisions.values()] == ["ring"]


def test_hanging_tune_inside_a_job_times_out_and_keeps_a_table(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(line_of(KEPT) + "\n")
    (tmp_path / "program.py").write_text(
        "import sys, time\n"
        "from unisono.cli import main\n"
        "from unisono.cli.commands import tune\n"
        "def measure(world, request, observe=None):\n"
        "    time.sleep(3 * world.rank)\n"
        "    world.barrier()\n"
        "tune.measure, tune._MARGIN_S = measure, 0.0\n"
        "sys.exit(main.main(['tune', '--budget', '0.5s', '--out', 't.json']))\n"
    )
    completed = unisono("run", "-n", "2", "program.py", folder=tmp_path)
    assert completed.returncode == 1
    assert "tuning has not ended within 1 s (twice the budget and 0 s): a rank hangs" in completed.stderr
    assert "Traceback" not in completed.stderr
    assert loaded(tmp_path / "t.json").decisions


def test_hanging_calibration_times_out_and_keeps_earlier_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "_LIMITS_S", {"short": 3.0})
    monkeypatch.setattr(calibrate, "measure_rounds", hang)
    monkeypatch.setattr(calibrate, "measure", lambda comm, known, short: (known._replace(links={}), []))
    result = CliRunner().invoke(calibrate.command, ["--short", "--transports", "shm", "-n", "3"])
    assert isinstance(result.exception, un.CollectiveTimeoutError)
    assert "3 ranks by shm have not been measured within 3 s: a rank hangs" in str(result.exception)
    assert calibrated(fingerprint()) == PRIORS._replace(links={})
