"""A first run on a GPU by one command (`scripts/gpu_day.sh`), run on the driver's double."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.gpu_stages import use_double

from unisono.bench import gpu
from unisono.bench.gpu_stages.checks import machine, probes
from unisono.bench.gpu_stages.results import targets
from unisono.bench.gpu_stages.speeds import ddp_rank
from unisono.tuning.decide.table import loaded

SCRIPT = gpu.ROOT / "scripts" / "gpu_day.sh"
DEADLINE_S = 280

Records = list[dict[str, Any]]


def run_script(*arguments: str, out: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHON": sys.executable, "OUT": str(out), **variables}
    return subprocess.run(
        [SCRIPT, *arguments], env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def probes_say_which_premises_hold_and_what_calls_cost(records: Records) -> None:
    premises = {record["name"]: record for record in of_kind(records, "premise")}
    assert set(probes.PREMISES) == set(premises), premises
    assert {name for name, _ in gpu.NEEDED if name != "CUDA IPC"} < set(premises)
    not_run = [record for record in premises.values() if record["name"].startswith("the probe of")]
    assert not not_run, not_run
    # Premises about memory need not hold on the double. Those of NEEDED must, so that all stages use flags and graphs.
    assert all(premises[name]["holds"] for name, _ in gpu.NEEDED if name in premises), premises
    costs = {record["name"]: record["us"] for record in of_kind(records, "cost")}
    held_up = {probes.WAITING.format(name, 300) for name in ("cuMemFree of 2 MiB", "cuIpcCloseMemHandle")}
    assert held_up < set(costs)
    assert {"cuLaunchKernel", "replay of a graph of 3 calls", "hand-over between processes, idle"} < set(costs)
    assert all(us > 0 for us in costs.values()), costs


def suites_pass_outside_the_tree_and_are_recorded_once(records: Records) -> None:
    tests = of_kind(records, "test")
    assert [test["outcome"] for test in tests if "interface" in test["name"] or "[" not in test["name"]], tests
    assert all(test["outcome"] == "passed" for test in tests if not test["name"].endswith(("[torch]", "[cupy]"))), tests
    names = sorted(test["name"].rpartition("::")[2] for test in tests)
    assert names == [
        "test_device_knows_its_name_uuid_and_reachable_devices",
        "test_flags_order_processes_on_the_driver",
        "test_memory_and_events_are_shared_by_processes[driver]",
        *(f"test_plans_on_registered_arrays_are_right[{library}]" for library in ("cupy", "interface", "torch")),
    ]
    assert [record["value"] for record in of_kind(records, "left")] == ["0", "0"]


def kernels_are_measured_beside_those_of_others(records: Records) -> None:
    kernels = of_kind(records, "kernel")
    measured = {(kernel["contender"], kernel["k"], kernel["nbytes"]) for kernel in kernels if "failure" not in kernel}
    assert {(name, k, size) for name in ("copy", "unisono") for k in (2, 3) for size in (100, 4096)} <= measured
    assert all(kernel["wrong"] == "" and kernel["gbps"] > 0 for kernel in kernels if "failure" not in kernel)
    assert {kernel["contender"] for kernel in kernels} == {"copy", "unisono", "torch.sum", "CuPy", "torch adds"}


def issuing_is_measured_by_programs_and_by_python(records: Records) -> None:
    issue = of_kind(records, "issue")
    assert [(record["way"], record["nbytes"]) for record in issue] == [("programs", 1024), ("Python", 1024)]
    assert all(record["host_us"] > 0 for record in issue)


def threads_are_measured_by_three_clocks(records: Records) -> None:
    threads = [record for record in of_kind(records, "allreduce") if record["placement"] == "threads"]
    assert [(thread["library"], thread["nbytes"]) for thread in threads] == [
        (f"unisono {algorithm}", nbytes) for nbytes in (1024, 4096) for algorithm in ("one_shot", "two_shot")
    ]
    assert all(thread["median_us"] > thread["host_us"] > 0 and thread["device_us"] > 0 for thread in threads)


def routes_are_measured_and_their_table_says_that_ranks_shared_a_gpu(records: Records) -> None:
    ways = {(record["route"], record["nbytes"]) for record in of_kind(records, "route")}
    assert ways == {(way, nbytes) for way in ("one_shot", "two_shot", "staged") for nbytes in (1024, 4096)}
    (written,) = of_kind(records, "table")
    assert written["shared_gpu"] == machine.DOUBLE
    table = loaded(Path(written["path"]))
    assert [(decision.collective, decision.ranks, decision.memory) for decision in table.decisions] == [
        ("allreduce", 2, "device")
    ]
    assert all(seconds for times in next(iter(table.decisions.values())).times_s.values() for seconds in times)


def processes_are_measured_by_calls_and_by_plans(records: Records) -> None:
    processes = [record for record in of_kind(records, "allreduce") if record["placement"] == "processes"]
    assert [(process["library"], process["nbytes"], process["ranks"]) for process in processes] == [
        ("unisono", 1024, 2),
        ("unisono plans", 1024, 2),
    ]
    assert all(process.get("median_us", 0) > 0 for process in processes), processes


def training_has_the_losses_of_gloo(records: Records) -> None:
    trainings = {record["way"]: record for record in of_kind(records, "training")}
    if "torch" in trainings:
        assert trainings["torch"]["failure"] == "torch is not installed"
        return
    assert all(trainings[way]["right"] and trainings[way]["step_ms"] > 0 for way in ddp_rank.WAYS), trainings
    others = {way for way in trainings if way not in ddp_rank.WAYS}
    assert others == {"CuPy: cupy_power.py", "JAX: allreduce"}


def sanitizer_runs_every_kernel_and_says_which_tool_is_missing(records: Records) -> None:
    under = of_kind(records, "sanitizer")
    assert under[0] == {"kind": "sanitizer", "tool": "none", "found": ""}
    assert {record["tool"] for record in under[1:]} == {"memcheck", "initcheck", "synccheck"}


CHECKS: tuple[Callable[[Records], None], ...] = (
    probes_say_which_premises_hold_and_what_calls_cost,
    suites_pass_outside_the_tree_and_are_recorded_once,
    kernels_are_measured_beside_those_of_others,
    issuing_is_measured_by_programs_and_by_python,
    threads_are_measured_by_three_clocks,
    routes_are_measured_and_their_table_says_that_ranks_shared_a_gpu,
    processes_are_measured_by_calls_and_by_plans,
    training_has_the_losses_of_gloo,
    sanitizer_runs_every_kernel_and_says_which_tool_is_missing,
)


def of_kind(records: Records, kind: str) -> Records:
    return [record for record in records if record["kind"] == kind]


def test_first_run_records_all_that_its_stages_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_double(monkeypatch)
    process = run_script("--small", "--python", sys.executable, out=tmp_path)
    assert process.stderr == ""
    assert "=== first: code 0" in process.stdout, process.stdout
    assert process.returncode == 0
    document = json.loads((tmp_path / "first.json").read_text())
    assert [(stage["name"], stage["ended"]) for stage in document["stages"]] == [
        (stage.name, "code 0") for stage in gpu.FIRST
    ]
    for check in CHECKS:
        check(document["records"])
    assert f"ranks that shared one GPU ({machine.DOUBLE}): they hold only there" in caplog.text
    assert "Targets" in (tmp_path / "first.log").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"first.json", "first.jsonl", "first.log", "gpu-table-2.json"}


ALONE = """
import sys
from unisono.bench.gpu_stages.speeds import ddp_rank

def alone(place):
    model = place.model()
    return ddp_rank.plain_step(place, model, place.optimizer(model))

def fails(place):
    raise ValueError("there is no such way")

ddp_rank.WAYS |= {"alone": ddp_rank.TrainingWay(alone, within=0.1), "fails": ddp_rank.TrainingWay(fails)}
sys.exit(ddp_rank.main())
"""


def test_training_whose_gradients_are_not_averaged_is_wrong(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    program = tmp_path / "alone.py"
    program.write_text(ALONE)
    arguments = ("--cpu", "--width", "64", "--steps", "30", "--ways", "gloo; alone; fails; DDP")
    process = subprocess.run(
        [sys.executable, "-m", "unisono", "run", "-n", "2", "--no-label", program, *arguments],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    records = {record["way"]: record for record in map(json.loads, process.stdout.splitlines())}
    assert {way: record.get("right") for way, record in records.items()} == {
        **{"gloo": True, "alone": False, "fails": None, "DDP": True},
    }
    assert records["fails"]["failure"] == "ValueError: there is no such way"
    (missed,) = [outcome for outcome in targets.outcomes(list(records.values())) if outcome.met is False]
    assert missed.worst.startswith("alone: off by ")


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return path


def test_rest_of_the_runs_goes_on_after_failures_and_ends_its_own_server(tmp_path: Path) -> None:
    noted, out = tmp_path / "noted", tmp_path / "out"
    codes = 'case "$*" in *"only machine,nccl"*) exit 4;; *"only machine,rest"*) exit 1;; esac'
    notes = f'echo "$CUDA_MPS_PIPE_DIRECTORY: $*" >>{noted}; {codes}'
    python = program(tmp_path / "python", f'case "$*" in *version_info*) echo cp0;; *) {notes};; esac\n')
    program(tmp_path / "nvidia-cuda-mps-control", f'[ "$1" = -d ] && echo begins >>{noted} || cat >>{noted}\n')
    path = os.pathsep.join((str(tmp_path), os.environ["PATH"]))
    process = run_script("--rest", "--small", out=out, PYTHON=str(python), PATH=path)
    assert process.returncode == 1
    assert [line.split(",")[0] for line in process.stdout.splitlines() if ": code" in line] == [
        "=== rest: code 1",
        "=== nccl: code 4",
        "=== mps: code 0",
    ]
    lines = noted.read_text().splitlines()
    assert [line.partition("--only ")[2].split(" ")[0] or line for line in lines] == [
        *("machine,rest", "machine,nccl", "begins", "machine,processes-2", "quit"),
    ]
    assert [line.startswith(": ") for line in lines if "--only" in line] == [True, True, False]
    assert all(line.endswith("--small") for line in lines if "--only" in line)
