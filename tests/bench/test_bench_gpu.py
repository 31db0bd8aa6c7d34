"""The command that measures everything on a machine with a GPU, run on the driver's double, and its time limits."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support import fake_cuda
from support.cuda_on_host import library_of

from unisono.bench import gpu
from unisono.bench.gpu_stages import report, targets
from unisono.dtypes import DTYPES
from unisono.operations import OPERATIONS
from unisono.transports.cuda.kernel_catalogue import reduction

MIB = 1 << 20
DEADLINE_S = 100
KERNELS = tuple(reduction(DTYPES["float32"], OPERATIONS["sum"], k) for k in (2, 3))


@pytest.fixture
def on_double(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: make cuda")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_cuda.folder()), prepend=os.pathsep)
    monkeypatch.setenv(fake_cuda.KERNELS, str(library_of(KERNELS)))


def run_stages(names: str, out: Path) -> dict[str, Any]:
    """Run stages as `make gpu` does, with this Python; return the document."""
    command = [sys.executable, gpu.__file__, "--python", sys.executable, "--small", "--only", names, "--out", out]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    document: dict[str, Any] = json.loads(out.read_text())
    assert "Targets" in ended.stdout, ended.stdout + ended.stderr
    assert ended.stderr == ""
    return document


def records(document: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [record for record in document["records"] if record["kind"] == kind]


@pytest.mark.usefixtures("on_double")
def test_gpu_machine_stage_records_packages_and_usable_features(tmp_path: Path) -> None:
    document = run_stages("machine", tmp_path / "results.json")
    assert document["format"] == gpu.FORMAT
    assert [(stage["name"], stage["ended"]) for stage in document["stages"]] == [("machine", "code 0")]
    assert {"system", "python", "cores", "packages", "nvidia-smi", "MPS"} <= {
        record["name"] for record in records(document, "machine")
    }
    probed = {record["name"]: record["usable"] for record in records(document, "probe")}
    assert probed["sealed memory"]
    assert probed["CUDA IPC"]
    assert {target["met"] for target in document["targets"]} == {None}


@pytest.mark.usefixtures("on_double")
def test_gpu_kernels_stage_records_copies_torch_and_cupy_beside_unisono(tmp_path: Path) -> None:
    document = run_stages("kernels", tmp_path / "results.json")
    kernels = records(document, "kernel")
    measured = {(each["contender"], each["k"], each["nbytes"]) for each in kernels if "failure" not in each}
    assert {(name, k, size) for name in ("copy", "unisono") for k in (2, 3) for size in (100, 4096)} <= measured
    assert all(each["wrong"] == "" and each["gbps"] > 0 for each in kernels if "failure" not in each)
    assert {each["contender"] for each in kernels} == {"copy", "unisono", "torch.sum", "CuPy", "torch adds"}


@pytest.mark.usefixtures("on_double")
def test_gpu_threads_stage_measures_ranks_that_are_threads(tmp_path: Path) -> None:
    document = run_stages("threads-2", tmp_path / "results.json")
    found = records(document, "allreduce")
    assert [(each["library"], each["nbytes"]) for each in found] == [
        (f"unisono {algorithm}", nbytes) for nbytes in (1024, 4096) for algorithm in ("one_shot", "two_shot")
    ]
    assert all(each["median_us"] > 0 for each in found)


@pytest.mark.usefixtures("on_double")
def test_gpu_processes_stage_measures_ranks_that_are_processes(tmp_path: Path) -> None:
    (found,) = records(run_stages("processes-2", tmp_path / "results.json"), "allreduce")
    assert (found["library"], found["nbytes"], found["ranks"]) == ("unisono", 1024, 2)
    assert found["median_us"] > 0


@pytest.mark.usefixtures("on_double")
def test_gpu_stage_ends_with_code_1_when_unisono_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fake_cuda.FAIL, "cuInit=100")
    document = run_stages("processes-2,machine", tmp_path / "results.json")
    assert {stage["name"]: stage["ended"] for stage in document["stages"]} == {
        "machine": "code 0",
        "processes-2": "code 1",
    }
    (failed,) = records(document, "allreduce")
    assert "NO_DEVICE" in failed["failure"]


def test_gpu_machine_stage_runs_even_if_the_build_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "build_command", lambda python, folder: [sys.executable, "-c", "raise SystemExit(3)"])
    out = tmp_path / "results.json"
    assert gpu.main(["--out", str(out), "--only", "machine,kernels"]) == 1
    document = json.loads(out.read_text())
    assert [(stage["name"], stage["ended"]) for stage in document["stages"]] == [
        ("build", "code 3"),
        ("machine", "code 0"),
    ]
    assert "packages" in {record["name"] for record in records(document, "machine")}


HANGS = """
import subprocess, sys, time
print('{"kind": "test", "name": "first"}', flush=True)
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
print('{"kind": "pid", "pid": %d}' % other.pid, flush=True)
print('{"kind": "ha', end="", flush=True)
time.sleep(100)
"""


def test_hanging_gpu_stage_is_ended_with_its_processes_before_the_next(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    run = gpu.Run(out, 60.0)
    assert not run.stage("hangs", 2.0, [sys.executable, "-c", HANGS], dict(os.environ))
    assert not run.stage("fails", 20.0, [sys.executable, "-c", "raise ValueError('no')"], dict(os.environ))
    assert run.stage("ends", 20.0, [sys.executable, "-c", "print('hello')"], dict(os.environ))
    document = json.loads(out.read_text())
    assert [record["kind"] for record in document["records"]] == ["test", "pid"]
    assert [stage["ended"] for stage in document["stages"]] == ["ended by its deadline of 2 s", "code 1", "code 0"]
    assert document["stages"][1]["said"][-1] == "ValueError: no"
    deadline = time.monotonic() + 5.0
    while Path(f"/proc/{document['records'][1]['pid']}").exists():
        assert time.monotonic() < deadline, "what the stage has started still lives"
        time.sleep(0.01)


LEAVES = """
import os, subprocess, sys
from unisono.bench import gpu

if sys.argv[1:]:
    subprocess.Popen(["sleep", "100"], start_new_session=True)
    sys.exit()
gpu._adopt_orphans()
ended = gpu.run_until([sys.executable, __file__, "leave"], 50.0, dict(os.environ))
print(ended.code, gpu._descendants())
"""


def test_processes_left_by_a_gpu_stage_are_ended_before_the_next(tmp_path: Path) -> None:
    program = tmp_path / "leaves.py"
    program.write_text(LEAVES)
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "0 set()"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:subprocess:ResourceWarning")
def test_gpu_stage_that_survives_sigkill_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "DYING_S", 0.1)
    kill, spared = os.kill, set[int]()
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda pid, number: spared.add(pid))
        ended = gpu.run_until(["sleep", "100"], 0.1, dict(os.environ))
    (pid,) = spared
    kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert ended.code is None


def test_no_gpu_stage_begins_when_the_time_is_over(tmp_path: Path) -> None:
    run = gpu.Run(tmp_path / "results.json", 0.0)
    assert not run.stage("late", 10.0, ["/nowhere"], {})
    assert run.document["stages"][0]["ended"] == "not run: no time was left"


def test_gpu_environment_sees_packages_of_its_parent_environment(tmp_path: Path) -> None:
    python = gpu.environment(tmp_path / "made")
    assert not Path(sys.prefix).samefile(tmp_path / "made")
    said = run_in(python, "import sys, numpy; print(sys.prefix)")
    assert said == str(tmp_path / "made")


def test_gpu_environment_finds_cuda_libraries_of_packages(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: make cuda")
    said = run_in(gpu.environment(tmp_path / "made"), "from cuda.bindings import nvrtc; print(nvrtc.nvrtcVersion()[1])")
    assert said == "13"


def run_in(python: Path, program: str) -> str:
    return subprocess.run(
        [python, "-c", program], capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()


def kernel(contender: str, gbps: float, **changed: Any) -> dict[str, Any]:
    about = {"kind": "kernel", "dtype": "float32", "k": 2, "nbytes": 256 * MIB, "contender": contender, "wrong": ""}
    moved = (2 if contender == "copy" else 3) * 256 * MIB
    return {**about, "gbps": gbps, "ms": moved / gbps / 1e6, **changed}


def allreduce(library: str, nbytes: int, median_us: float, placement: str = "processes") -> dict[str, Any]:
    about = {"kind": "allreduce", "placement": placement, "ranks": 2, "library": library}
    return {**about, "nbytes": nbytes, "median_us": median_us}


def verdicts(*found: dict[str, Any]) -> dict[str, bool | None]:
    return {outcome.target: outcome.met for outcome in targets.outcomes(found)}


def test_kernel_targets_are_met_or_missed_by_measured_bandwidth() -> None:
    name = "float32 reductions reach 0.95 of the bandwidth of a copy"
    copy = kernel("copy", 4000.0)
    assert verdicts(copy, kernel("unisono", 3900.0))[name] is True
    assert verdicts(copy, kernel("unisono", 3700.0))[name] is False
    assert verdicts(copy, kernel("unisono", 3700.0, nbytes=MIB))[name] is None
    faster = "reductions are faster than torch's and CuPy's"
    assert verdicts(kernel("unisono", 3000.0), kernel("CuPy", 2900.0))[faster] is True
    assert verdicts(kernel("unisono", 3000.0), kernel("CuPy", 3100.0))[faster] is False
    right = "kernels give the results of the definition"
    assert verdicts(kernel("unisono", 1.0, wrong="byte 3 differs"))[right] is False


def test_allreduce_targets_are_met_or_missed_by_measured_time() -> None:
    copy = kernel("copy", 4000.0)
    name = "thread-ranks reduce 256 MiB within 1.25 times the time of the bytes moved"
    bound_us = targets.traffic_nbytes(2, 256 * MIB) / 4000.0 / 1e3
    for times, met in ((1.2, True), (1.3, False)):
        assert verdicts(copy, allreduce("unisono two_shot", 256 * MIB, times * bound_us, "threads"))[name] is met
    name = "process-ranks are 10 times as fast as Gloo from 16 MiB on"
    for nbytes, us, met in ((16 * MIB, 90.0, True), (16 * MIB, 110.0, False), (MIB, 110.0, None)):
        assert verdicts(allreduce("gloo", nbytes, 1000.0), allreduce("unisono", nbytes, us))[name] is met


def test_failed_test_misses_the_target_of_tests() -> None:
    passed = {"kind": "test", "name": "a", "outcome": "passed", "said": ""}
    failed = {"kind": "test", "name": "b", "outcome": "failure", "said": "no"}
    (found, *_) = targets.outcomes([passed, failed])
    assert (found.met, found.worst) == (False, "b: no")


def test_report_shows_tables_and_a_reason_for_missing_measurements() -> None:
    lacking = {"kind": "kernel", "dtype": "float32", "k": 2, "nbytes": MIB, "contender": "CuPy", "failure": "not there"}
    found = [kernel("copy", 4000.0), kernel("unisono", 3900.0), lacking, allreduce("gloo", MIB, 12.5)]
    shown = report.tables({"records": found, "stages": []})
    rows = {str(table.title): [list(column.cells) for column in table.columns] for table in shown}
    assert rows["Reductions, GB/s"] == [["float32"] * 2, ["2"] * 2, ["256 MiB", "1 MiB"], ["4000", ""], ["3900", ""]]
    assert rows["Not measured"] == [["CuPy"], ["not there"]]
    assert rows["Allreduce float32, µs"][-1] == ["12.5"]


def test_report_shows_reasons_verbatim() -> None:
    why = "not found in [/opt/cuda]: pip install 'unisono[cuda]'"
    lacking = kernel("CuPy", 1.0, failure=why)
    failed = {"kind": "test", "name": "b", "outcome": "failure", "said": why}
    console = Console(width=300, record=True, file=io.StringIO())
    for table in report.tables({"records": [lacking, failed], "stages": []}):
        console.print(table)
    assert console.export_text().count(why) == 2
