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
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from support import fake_cuda, fake_nccl
from support.gpu_stages import use_double

from unisono.bench import gpu
from unisono.bench.driver import Sample, Settings
from unisono.bench.gpu_stages import nccl
from unisono.bench.gpu_stages.checks import machine, probes, suite
from unisono.bench.gpu_stages.gpu import windows
from unisono.bench.gpu_stages.results import report, targets
from unisono.bench.gpu_stages.speeds import kernels, processes, routes, variants
from unisono.dtypes import DTYPES
from unisono.errors import TransportUnavailableError
from unisono.transports.host.core_distance import CorePlacement

MIB = 1 << 20
DEADLINE_S = 100


@pytest.fixture
def on_double(monkeypatch: pytest.MonkeyPatch) -> None:
    use_double(monkeypatch)


def run_stages(names: str, out: Path) -> dict[str, Any]:
    """Run stages as `make gpu` does, with this Python; return the document."""
    command = [sys.executable, gpu.__file__, "--python", sys.executable, "--small", "--only", names, "--out", out]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    document: dict[str, Any] = json.loads(out.read_text())
    assert "Targets" in completed.stdout, completed.stdout + completed.stderr
    assert completed.stderr == ""
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


def test_gpu_routes_stage_fails_when_nothing_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise TransportUnavailableError("no GPU")

    monkeypatch.setattr(routes.un, "launch", refuse)
    monkeypatch.setattr(sys, "argv", ["routes"])
    assert routes.main() == 1
    assert "no route could be measured" in capsys.readouterr().err


def test_package_holds_no_table_of_ranks_that_shared_a_gpu() -> None:
    folders = [folder.resolve() for folder in gpu.ROOT.glob("unisono/*") if folder.is_dir()]
    files = [path for folder in folders for path in folder.rglob("*.json") if gpu.RESULTS not in path.parents]
    assert not [path for path in files if '"shared_gpu"' in path.read_text()]


def test_version_of_nccl_is_that_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, version, is_refused in (("22809", (2, 28), True), ("23007", (2, 30), False)):
        monkeypatch.setenv(fake_nccl.VERSION, number)
        monkeypatch.setattr(nccl, "_places", lambda: ["/nowhere/libnccl.so.2", str(fake_nccl.library())])
        assert nccl.library_version() == version
        assert bool(nccl.refusal()) is is_refused
    monkeypatch.setattr(nccl, "_places", lambda: ["/nowhere/libnccl.so.2"])
    assert nccl.library_version() is None
    assert nccl.refusal() == "libnccl.so.2 is not installed"


@pytest.mark.usefixtures("on_double")
def test_gpu_variants_stage_records_each_variant_in_each_grid(tmp_path: Path) -> None:
    results = records(run_stages("variants", tmp_path / "results.json"), "variant")
    assert {(result["variant"], result["waves"]) for result in results} == {
        (variant, waves) for variant in variants.OF_OPS["sum"] for waves in (1, 2, 4, 0)
    }
    assert all(result["wrong"] == "" for result in results), results
    assert [(result["variant"], result["waves"]) for result in results if result["kept"]] == [("plain", 1)]


@pytest.mark.usefixtures("on_double")
def test_gpu_hosts_stage_measures_ranks_of_two_hosts_beside_staging(tmp_path: Path) -> None:
    results = records(run_stages("hosts-4", tmp_path / "results.json"), "allreduce")
    assert [(result["library"], result["nbytes"]) for result in results] == [
        (library, nbytes) for library in ("unisono", "unisono staged") for nbytes in (1024, 4096)
    ]
    assert all(result["median_us"] > 0 and result["placement"] == "two hosts" for result in results)


def test_tests_on_a_gpu_run_side_by_side_if_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    result = object()
    for spec, workers, expected in ((result, 4, True), (result, 1, False), (None, 4, False)):
        monkeypatch.setattr(suite.importlib.util, "find_spec", lambda name, spec=spec: spec)
        assert bool(suite.side_by_side(workers)) is expected


def test_gpu_run_without_a_gpu_ends_after_the_machine(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: make cuda")
    if fake_cuda.has_gpu():
        pytest.skip("this machine has a GPU")
    out = tmp_path / "results.json"
    assert gpu.main(["--python", sys.executable, "--out", str(out)]) == gpu.NO_GPU
    assert [stage["name"] for stage in json.loads(out.read_text())["stages"]] == ["machine"]
    assert "no GPU can be measured here" in capfd.readouterr().out


@pytest.mark.usefixtures("on_double")
def test_double_of_the_driver_is_no_gpu_of_a_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "results.json"
    assert gpu.main(["--python", sys.executable, "--out", str(out), "--only", "machine,issue"]) == gpu.NO_GPU
    (stage,) = json.loads(out.read_text())["stages"]
    assert "the driver is the double of the tests" in stage["said"][-1]
    monkeypatch.setenv(fake_cuda.FORBIDDEN, "1")
    assert machine.FORBIDDEN == gpu.REAL_GPU == fake_cuda.FORBIDDEN
    with pytest.raises(RuntimeError, match="no GPU that works"):
        fake_cuda.folder.__wrapped__()


def test_gpu_stages_of_a_first_run_have_time_for_all_of_them() -> None:
    assert gpu.INSTALL_S + sum(stage.budget_s for stage in gpu.FIRST) <= 500
    assert len({stage.name for stage in gpu.STAGES}) == len(gpu.STAGES)
    assert gpu.stages_of("") == list(gpu.STAGES)
    assert [stage.name for stage in gpu.stages_of("kernels,machine")] == ["machine", "kernels"]
    assert gpu.stages_of("rest") == list(gpu.REST)


def test_unknown_gpu_stage_is_refused_with_the_names_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--only", "machine,kernel"])
    said = capsys.readouterr().err
    assert "there is no stage kernel; there are" in said
    assert "threads-2" in said


def test_gpu_stages_do_without_what_a_driver_is_wrong_about() -> None:
    def premise(name: str, holds: bool) -> dict[str, Any]:
        return {"kind": "premise", "name": name, "holds": holds}

    assert gpu.refuted([premise(probes.CYCLIC, True), {"kind": "probe", "name": "CUDA IPC", "usable": True}]) == {}
    assert gpu.refuted([premise(probes.GRAPHS, False)]) == {gpu.WITHOUT: "graphs"}
    results = [premise(probes.CYCLIC, False), {"kind": "probe", "name": "CUDA IPC", "usable": False}]
    assert gpu.refuted(results) == {gpu.WITHOUT: "flags,graphs"}


def test_probes_name_parts_of_the_code_that_exist() -> None:
    named = {text.partition(":")[0] for text in probes.PREMISES.values()}
    assert all((gpu.ROOT / "transports" / "cuda" / path).is_file() for path in named), named


HAS = """
from unisono.transports.cuda.driver_api.cuda_device import CudaDevice
device = CudaDevice()
print(device.has_flags(), device.has_graphs())
"""


@pytest.mark.usefixtures("on_double")
def test_device_does_without_flags_or_graphs_for_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    for without, expected in (("flags", "False False"), ("graphs", "True False"), ("", "True True")):
        monkeypatch.setenv(gpu.WITHOUT, without)
        assert run_in(Path(sys.executable), HAS) == expected


def test_report_says_which_premise_is_confirmed_or_refuted() -> None:
    about = {"kind": "premise", "name": "a wait ends", "figure": "1 ms", "premise": "flags"}
    results = [{**about, "holds": True}, {**about, "holds": False}]
    copy, launch = ({"kind": "cost", "name": name, "us": us} for name, us in (("a copy", 2.0), ("a launch", 1.5)))
    shown = report.tables({"records": [*results, {**copy, "gbps": 3000.0}, launch], "stages": []})
    rows = {str(table.title): [list(column.cells) for column in table.columns] for table in shown}
    assert rows["Premises of the code"][1] == ["[green]confirmed[/]", "[red]refuted[/]"]
    assert rows["Costs of the driver"] == [["a copy", "a launch"], ["2.00", "1.50"], ["3000", ""]]


OUTCOMES = """
import time
import pytest
pytestmark = pytest.mark.gpu
def test_passes():
    pass
def test_fails():
    assert 1 == 2, "one is not two"
def test_skips():
    pytest.skip("no GPU")
def test_hangs():
    time.sleep(1000)
"""


def test_outcomes_of_tests_survive_the_deadline_of_their_stage(tmp_path: Path) -> None:
    file, lines = tmp_path / "test_outcomes.py", tmp_path / "records.jsonl"
    file.write_text(OUTCOMES)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    command = [sys.executable, "-m", "unisono.bench.gpu_stages.checks.suite", str(file)]
    with lines.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + DEADLINE_S
    while len(lines.read_text().splitlines()) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    results = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(result["outcome"], result["said"]) for result in results] == [
        ("passed", ""),
        ("failure", "AssertionError: one is not two"),
        ("skipped", "Skipped: no GPU"),
    ]


@pytest.mark.usefixtures("on_double")
def test_gpu_nccl_stage_lets_a_rank_that_is_alone_call_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nccl.bindings", reason="the binding of NCCL is not installed: make cuda")
    monkeypatch.setenv("LD_PRELOAD", str(fake_nccl.library()))
    (result,) = records(run_stages("nccl-1", tmp_path / "results.json"), "allreduce")
    assert (result["library"], result["ranks"], result["nbytes"]) == ("nccl.native", 1, 1024)
    assert result["median_us"] > 0


@pytest.mark.usefixtures("on_double")
def test_gpu_stage_ends_with_code_1_when_unisono_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fake_cuda.FAIL, "cuInit=100")
    document = run_stages("processes-2", tmp_path / "results.json")
    assert {stage["name"]: stage["ended"] for stage in document["stages"]} == {"processes-2": "code 1"}
    failed, _ = records(document, "allreduce")
    assert "NO_DEVICE" in failed["failure"]


def test_gpu_machine_stage_runs_even_if_the_build_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "build_command", lambda python, folder: [sys.executable, "-c", "raise SystemExit(3)"])
    out = tmp_path / "results.json"
    assert gpu.main(["--out", str(out), "--only", "machine,kernels"]) == gpu.NO_GPU
    document = json.loads(out.read_text())
    assert [(stage["name"], stage["ended"]) for stage in document["stages"]] == [
        ("build", "code 3"),
        ("machine", "code 1"),
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
    assert [json.loads(line)["kind"] for line in out.with_suffix(".jsonl").read_text().splitlines()[:2]] == [
        "test",
        "pid",
    ]
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
    completed = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60, check=True)
    assert completed.stdout.strip() == "0 set()"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:subprocess:ResourceWarning")
def test_gpu_stage_that_survives_sigkill_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "DYING_S", 0.1)
    kill, spared = os.kill, set[int]()
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda pid, number: spared.add(pid))
        result = gpu.run_until(["sleep", "100"], 0.1, dict(os.environ))
    (pid,) = spared
    kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert result.code is None


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


def test_kept_variants_must_be_about_as_fast_as_the_fastest_ones() -> None:
    def measured(variant: str, gbps: float, kept: bool = False, nbytes: int = 256 * MIB) -> dict[str, Any]:
        about = {"kind": "variant", "dtype": "float32", "op": "sum", "k": 2, "nbytes": nbytes, "wrong": ""}
        return {**about, "variant": variant, "waves": 1, "gbps": gbps, "kept": kept}

    name = "kept variants are at least 0.98 times as fast as all others"
    kept = measured("plain", 3000.0, kept=True)
    assert verdicts(kept, measured("pipelined", 3030.0))[name] is True
    assert verdicts(kept, measured("pipelined", 3100.0))[name] is False
    assert verdicts(measured("plain", 1.0, kept=True, nbytes=MIB), measured("pipelined", 2.0, nbytes=MIB))[name] is None


def test_kernel_targets_are_met_or_missed_by_measured_bandwidth() -> None:
    name = "float32 reductions reach 0.95 of the bandwidth of a copy"
    copy = kernel("copy", 4000.0)
    assert verdicts(copy, kernel("unisono", 3900.0))[name] is True
    assert verdicts(copy, kernel("unisono", 3700.0))[name] is False
    assert verdicts(copy, kernel("unisono", 3700.0, nbytes=MIB))[name] is None
    faster = "reductions are at least 0.98 times as fast as torch's and CuPy's"
    assert verdicts(kernel("unisono", 3000.0), kernel("CuPy", 3030.0))[faster] is True
    assert verdicts(kernel("unisono", 3000.0), kernel("CuPy", 3100.0))[faster] is False
    chained = "reductions of 4 arrays and more are 1.3 times as fast as chained additions"
    assert verdicts(kernel("unisono", 3000.0), kernel("torch adds", 1000.0))[chained] is None
    for gbps, met in ((2200.0, True), (2400.0, False)):
        four = [kernel(name, speed, k=4) for name, speed in (("unisono", 3000.0), ("torch adds", gbps))]
        assert verdicts(*four)[chained] is met
    right = "kernels give the results of the definition"
    assert verdicts(kernel("unisono", 1.0, wrong="byte 3 differs"))[right] is False


def test_allreduce_targets_are_met_or_missed_by_measured_time() -> None:
    copy = kernel("copy", 4000.0)
    name = "thread-ranks reduce 256 MiB within 1.25 times the time of the bytes moved"
    bound_us = targets.traffic_nbytes(2, 256 * MIB) / 4000.0 / 1e3
    for times, met in ((1.2, True), (1.3, False)):
        of_device = {**allreduce("unisono two_shot", 256 * MIB, 9e9, "threads"), "device_us": times * bound_us}
        assert verdicts(copy, of_device)[name] is met
    name = "process-ranks are 10 times as fast as Gloo from 16 MiB on"
    for nbytes, us, met in ((16 * MIB, 90.0, True), (16 * MIB, 110.0, False), (MIB, 110.0, None)):
        assert verdicts(allreduce("gloo", nbytes, 1000.0), allreduce("unisono", nbytes, us))[name] is met


def test_finding_of_the_sanitizer_misses_its_target() -> None:
    name = "compute-sanitizer finds nothing"
    assert verdicts({"kind": "sanitizer", "tool": "memcheck", "found": ""})[name] is True
    assert verdicts({"kind": "sanitizer", "tool": "memcheck", "found": "Invalid read"})[name] is False
    assert verdicts({"kind": "sanitizer", "tool": "memcheck", "failure": "not there"})[name] is None
    assert verdicts({"kind": "sanitizer", "tool": "none", "found": ""})[name] is None
    assert verdicts({"kind": "sanitizer", "tool": "none", "found": "wrong"})[name] is False


def test_gpu_results_go_where_the_caller_or_the_machine_expects_them(tmp_path: Path) -> None:
    assert gpu._default_out({"OUT": str(tmp_path)}) == tmp_path / "gpu.json"
    assert gpu._default_out({}).parent == gpu.RESULTS


def test_gpu_build_finds_tools_beside_python_and_uses_all_cores() -> None:
    path = os.pathsep.join(("/wheels", str(gpu.ROOT)))
    variables = {"PATH": "/bin", "UNISONO_TRANSPORTS": "tcp", "PYTHONHOME": "/usr", "PYTHONPATH": path}
    result = gpu.settings(variables, "/scratch")
    assert result["PYTHONPATH"] == "/wheels"
    assert "PYTHONHOME" not in result
    assert result[gpu.REAL_GPU] == "1"
    assert gpu.REAL_GPU not in gpu.settings({}, "/scratch", allows_double=True)
    assert result["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/bin"]
    assert result["CMAKE_BUILD_PARALLEL_LEVEL"] == str(len(os.sched_getaffinity(0)))
    assert "UNISONO_TRANSPORTS" not in result


def test_gpu_environment_that_is_kept_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, made = tmp_path / "unisono.whl", list[str]()
    wheel.write_bytes(b"first")

    def stage(self: gpu.Run, name: str, budget_s: float, command: list[Any], environ: dict[str, str]) -> bool:
        made.append(name)
        assert command[-1] == wheel or name == "machine"
        return True

    monkeypatch.setattr(gpu.Run, "stage", stage)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0))
    monkeypatch.setattr(gpu, "environment", lambda folder: (folder.mkdir(exist_ok=True), folder / "bin" / "python")[1])
    arguments = ["--out", tmp_path / "out.json", "--keep", tmp_path / "kept", "--wheel", wheel, "--only", "machine"]
    for _ in range(2):
        assert gpu.main(list(map(str, arguments))) == 0
    assert made == ["build", "machine", "machine"]
    wheel.write_bytes(b"second")
    assert gpu.main(list(map(str, arguments))) == 0
    assert made[3:] == ["build", "machine"]


def test_compared_windows_contain_both_ends_of_an_array() -> None:
    assert windows(1000) == [slice(0, 1000)]
    long = windows(1 << 28)
    assert long[0].start == 0
    assert long[1].stop == 1 << 28
    assert len({window.start for window in long}) == 16


def test_rows_of_a_size_are_printed_when_its_last_round_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    library = processes.LIBRARIES["unisono"]
    settings = Settings("allreduce", 2, (1024, 4096), "float32", 4, (library,), 2, 1.0, "none")
    printer = processes.RowPrinter(settings)
    near = CorePlacement("near", 50.0)
    for number in range(2):
        printer.step("1 KiB")
        assert capsys.readouterr().out == ""
        printer.driver.results.samples.append(Sample(1024, "unisono", number, near, np.array([1.0])))
    printer.step("unisono, 4096 B: verifying")
    (record,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (record["nbytes"], record["library"]) == (1024, "unisono")


def test_library_that_cannot_run_is_recorded_without_being_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes.BenchDriver, "run", lambda self: None)
    monkeypatch.setattr(processes.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["processes", "--libraries", "MPI staged,gloo"])
    assert processes.main() == 0
    (record,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (record["library"], record["failure"]) == ("MPI staged", "mpirun or mpi4py is not installed")


def test_kernels_of_others_are_measured_when_ours_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(stack: Any) -> Any:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(kernels, "CONTENDERS", {"copy": lambda stack: lambda: None, "unisono": fail})
    stack = SimpleNamespace(dtype=DTYPES["float32"], k=2, target=SimpleNamespace(nbytes=8))
    kernels.measure(stack, SimpleNamespace(milliseconds=lambda issue: 1.0))  # type: ignore[arg-type]
    results = list(map(json.loads, capsys.readouterr().out.splitlines()))
    assert [(result["contender"], "failure" in result) for result in results] == [("unisono", True), ("copy", False)]


def test_failed_test_misses_the_target_of_tests() -> None:
    passed = {"kind": "test", "name": "a", "outcome": "passed", "said": ""}
    failed = {"kind": "test", "name": "b", "outcome": "failure", "said": "no"}
    (result, *_) = targets.outcomes([passed, failed])
    assert (result.met, result.worst) == (False, "b: no")


def test_report_shows_tables_and_a_reason_for_missing_measurements() -> None:
    lacking = {"kind": "kernel", "dtype": "float32", "k": 2, "nbytes": MIB, "contender": "CuPy", "failure": "not there"}
    results = [kernel("copy", 4000.0), kernel("unisono", 3900.0), lacking, allreduce("gloo", MIB, 12.5)]
    shown = report.tables({"records": results, "stages": []})
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
