from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.deadlines import DEADLINE_S

from unisono.cli.commands import doctor
from unisono.cli.machine.checks import CHECKS, PACKAGES, Check, CheckResult, Package, look_for, run_checks
from unisono.cli.machine.means import LAUNCHERS, STORES, TRANSPORTS, Means, judged
from unisono.options import FIELDS

ABSENT = Package("absent_package", "import absent_package", "pip install absent-package")


def run_doctor(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "unisono", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "COLUMNS": "200", **environ},
        check=False,
    )


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    completed = run_doctor("--json")
    assert (completed.returncode, completed.stderr) == (0, "")
    document: dict[str, Any] = json.loads(completed.stdout)
    return document


def test_doctor_finds_all_checks_usable_here(report: dict[str, Any]) -> None:
    assert {check["subject"] for check in report["checks"]} == {check.subject for check in CHECKS}
    assert all(check["usable"] for check in report["checks"])


def test_doctor_finds_the_native_core_loaded(report: dict[str, Any]) -> None:
    core = next(check for check in report["checks"] if check["subject"] == "native core")
    assert core["detail"].startswith("loaded")


def test_doctor_names_reason_and_remedy_for_each_missing_package(report: dict[str, Any]) -> None:
    assert [package["subject"] for package in report["packages"]] == [package.name for package in PACKAGES]
    for package in report["packages"]:
        assert package["detail"]
        assert package["usable"] or package["remedy"].startswith(("pip install ", "conda install "))


def test_doctor_finds_each_installed_package_usable(report: dict[str, Any]) -> None:
    packages = {finding["subject"]: finding for finding in report["packages"]}
    installed = [package.name for package in PACKAGES if importlib.util.find_spec(package.name)]
    unusable = {name: packages[name]["detail"] for name in installed if not packages[name]["usable"]}
    # CuPy without a GPU's driver, mpi4py without an MPI and Keras without a backend are installed, and cannot be used.
    assert not [name for name, detail in unusable.items() if "AttributeError" in detail or "SyntaxError" in detail]
    assert set(unusable) <= {"cupy", "mpi4py", "keras"}, unusable


def test_doctor_judges_each_transport_launcher_and_store(report: dict[str, Any]) -> None:
    for table, means in (("transports", TRANSPORTS), ("launchers", LAUNCHERS), ("stores", STORES)):
        rows = {row["subject"]: row for row in report[table]}
        assert [name for name in rows if name in {mean.name for mean in means}] == [mean.name for mean in means]
        assert all(row["usable"] or row["remedy"] or row["subject"] in ("nccl", "cuda_ipc") for row in rows.values())
    assert {row["subject"] for row in report["transports"] if row["usable"]} >= {"shm", "tcp"}


def test_means_is_unusable_for_the_first_reason_and_with_its_remedy() -> None:
    means = [Means("ucx", ("native core", "ucxx"), "between hosts"), Means("x", (), "nothing", "absent-x", "get x")]
    findings = {
        "native core": CheckResult("native core", True, "loaded", required=True),
        "ucxx": CheckResult("ucxx", False, "not installed", "pip install ucxx"),
    }
    assert judged(means, findings) == [
        CheckResult("ucx", False, "ucxx: not installed", "pip install ucxx"),
        CheckResult("x", False, "there is no executable absent-x", "get x"),
    ]


def test_doctor_shows_value_and_origin_of_each_setting() -> None:
    settings = json.loads(run_doctor("--json", UNISONO_TRANSPORTS="tcp").stdout)["settings"]
    assert [setting["name"] for setting in settings] == list(FIELDS)
    origins = {setting["name"]: (setting["value"], setting["origin"]) for setting in settings}
    assert origins["transports"] == ("tcp", "UNISONO_TRANSPORTS")
    assert origins["timeout_s"] == ("300.0", "default")


def test_doctor_reports_an_unusable_setting() -> None:
    completed = run_doctor("--json", UNISONO_TRANSPORTS="pigeon")
    assert completed.returncode == 1
    document = next(check for check in json.loads(completed.stdout)["checks"] if check["subject"] == "settings")
    assert "UNISONO_TRANSPORTS='pigeon' cannot be used" in document["detail"]


def test_doctor_prints_tables_without_json_option() -> None:
    completed = run_doctor()
    assert completed.returncode == 0
    for text in (
        "Needed",
        "native core",
        "Optional packages",
        "torch",
        "Settings",
        "UNISONO_BIND_ADDRESS",
        "calibrat",
        "Trust: ",
    ):
        assert text in completed.stdout


def test_doctor_shows_long_remedies_whole_in_a_narrow_terminal() -> None:
    remedy = f"pip install -e '{'/long' * 30}'"
    console = Console(width=80, file=io.StringIO())
    console.print(doctor._table("Optional packages", [CheckResult("package", usable=False, detail="", remedy=remedy)]))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in shown
    assert shown.count("/") == 30


def test_failed_required_check_says_why_and_makes_the_report_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise PermissionError(1, "Operation not permitted")

    (finding,) = run_checks([Check("shared memory", fail, "", "", "ranks need it")])
    assert not finding.usable
    consequence = "Unisono cannot be used without it: ranks need it"
    assert finding.detail == f"PermissionError: [Errno 1] Operation not permitted: {consequence}"
    assert not doctor.Diagnosis({}, [finding], [], [], [], [], [], [], "", "").healthy


@pytest.mark.parametrize(
    ("lack", "why"),
    [
        (PermissionError(1, "Operation not permitted"), "Operation not permitted"),
        (AttributeError("pidfd_open"), "this Python has no os.pidfd_open"),
    ],
)
def test_doctor_is_healthy_without_pidfds(monkeypatch: pytest.MonkeyPatch, lack: Exception, why: str) -> None:
    def refuse(_: int) -> int:
        raise lack

    monkeypatch.setattr("os.pidfd_open", refuse)
    findings = run_checks()
    match = next(finding for finding in findings if finding.subject == "process watching")
    assert match.detail.startswith(f"OSError: pidfd_open fails ({why}): launchers look")
    assert doctor.Diagnosis({}, findings, [], [], [], [], [], [], "", "").healthy


def test_doctor_does_not_import_packages_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('the file of the user was imported')")
    monkeypatch.chdir(tmp_path)
    (finding,) = look_for([ABSENT._replace(statement="import queue; print('found')")])
    assert (finding.usable, finding.detail) == (True, "found")


def test_doctor_reports_an_absent_package_as_not_installed() -> None:
    (finding,) = look_for([ABSENT])
    assert (finding.usable, finding.detail, finding.remedy) == (False, "not installed", "pip install absent-package")


def test_doctor_shows_the_error_of_a_package_that_fails_to_import() -> None:
    broken = ABSENT._replace(statement="import ctypes; ctypes.CDLL('libabsent.so.1')")
    (finding,) = look_for([broken])
    assert finding.detail.startswith("OSError: libabsent.so.1")


def test_doctor_survives_a_package_that_crashes_the_interpreter() -> None:
    (finding,) = look_for([ABSENT._replace(statement="import os; os.abort()")])
    assert (finding.usable, finding.detail) == (False, "its import ended with code -6")


@pytest.mark.parametrize(
    ("environ", "trust"),
    [
        ({}, "No launcher"),
        ({"UNISONO_RANK": "0", "UNISONO_SIZE": "2", "UNISONO_STORE": "tcp://127.0.0.1:1"}, "Rank 0 makes"),
        ({"UNISONO_RANK": "0"}, "unknown, as the launcher is"),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2"},
            "Rank 0 makes this job's key and hands it out by MPI",
        ),
    ],
)
def test_doctor_says_who_makes_the_key_of_a_job(environ: dict[str, str], trust: str) -> None:
    assert doctor.trust(environ).startswith(trust)


def test_doctor_gpu_checks_pass_or_say_what_is_missing(report: dict[str, Any]) -> None:
    assert [finding["subject"] for finding in report["gpus"]] == [
        "GPU driver",
        "NVRTC",
        "GPU 0",
        "GPU memory",
        "GPU topology",
        "CUDA IPC",
    ]
    assert all(finding["usable"] or finding["detail"] for finding in report["gpus"])


def test_doctor_says_that_the_launcher_made_the_key() -> None:
    command = [sys.executable, "-m", "unisono", "run", "-n", "1", "-m", "unisono", "doctor", "--json"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert "The launcher made this job's key" in completed.stdout


def test_doctor_shows_core_numbers_as_ranges() -> None:
    assert doctor.ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert doctor.ranges([3]) == "3"


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({}, "none found: init() makes a job of one rank"),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2"},
            "mpiexec of MPICH or Intel MPI, as rank 1 of 2, to meet by MPI",
        ),
        ({"UNISONO_SIZE": "2"}, "unknown: UNISONO_SIZE is set but"),
    ],
)
def test_doctor_names_the_launcher_of_the_process(environ: dict[str, str], launcher: str) -> None:
    assert doctor.launcher(environ).startswith(launcher)
