"""The backend of torch.distributed, used as people use it, by real ranks. Each test starts them once."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.deadlines import DEADLINE_S, eventually

pytest.importorskip("torch.distributed", reason="make torch installs what these tests need")

import torch
from support.ports import free_port
from support.torch_ranks import PROGRAMS, ended, lines_of, run
from torch.distributed.fsdp import FSDPModule

# Whether torch takes a backend of c10d that is written in Python, as it does from 2.14 on.
NATIVE = torch.torch_version.TorchVersion(torch.__version__) >= (2, 14)
native = pytest.mark.skipif(not NATIVE, reason="this version of torch takes no backend written in Python")


def without_noise(lines: list[str]) -> list[str]:
    """Return the lines that are neither of torch's profiler nor of Gloo."""
    return [line for line in lines if not line.startswith(("USDT:", "ERROR:", "[Gloo]"))]


@pytest.mark.clients
def test_torch_backend_makes_the_calls_of_gloo_and_more(tmp_path: Path) -> None:
    for lines in lines_of(run("calls", 3, tmp_path)):
        assert without_noise(lines) == ["all calls were made"]


def test_torch_backend_takes_gpu_tensors_or_refuses_them_by_backend_name(tmp_path: Path) -> None:
    refused = [] if NATIVE else ["refused"]
    for lines in lines_of(run("on_gpu", 2, tmp_path)):
        assert without_noise(lines) == ["all calls were made", *refused]


def test_training_with_ddp_equals_that_of_one_process(tmp_path: Path) -> None:
    outputs = lines_of(run("training", 2, tmp_path))
    for lines in outputs:
        assert len(lines) == 15
        assert [line for line in lines if not line.endswith(": equal")] == []


def test_sharded_torch_training_equals_that_of_one_process(tmp_path: Path) -> None:
    for lines in lines_of(run("sharded", 2, tmp_path)):
        assert len(lines) == (10 if hasattr(FSDPModule, "set_custom_all_gather") else 8)
        assert [line for line in lines if not line.endswith(": equal")] == []


@native
def test_native_torch_backend_has_what_torch_offers_to_backends(tmp_path: Path) -> None:
    parts = "devices device_types_that_are_not_served monitored_barrier timeouts messages works splits hooks"
    expected = [*parts.split(), "abort_hooks", "memory", "shrinking"]
    assert [without_noise(lines) for lines in lines_of(run("native_backend", 3, tmp_path))] == [expected] * 3


@native
def test_calls_pass_the_checks_of_torch_in_debug_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    for lines in lines_of(run("debugged", 2, tmp_path)):
        assert lines[0] == "[3.0, 3.0]"
        assert "Detected mismatch between collectives on ranks" in lines[1]


# The facts of an error: its kinds, its cause, and words of its text.
ERRORS = {
    "before": ("ValueError", "NoneType", "has not been initialized"),
    "dtypes": ("CallError", "UsageError", "must be of one dtype and device"),
    "sizes": ("CallError", "UsageError", "out has shape (5,)"),
    "operation": ("CallError", "UsageError", "not defined for float32"),
    "list": ("CallError", "UsageError", "4 tensors, and the group has 2 ranks"),
    "expanded": ("CallError", "UsageError", "expand()"),
    "DTensor": ("CallError", "UsageError", "to_local()"),
    "device": ("NotImplementedError", "NoneType", "meta"),
    "second default group": ("ValueError", "NoneType", "twice"),
    "options": ("TypeError", "NoneType", "pg_options must be unisono.torch.Options"),
    "timeout in seconds": ("UsageError", "NoneType", "datetime.timedelta"),
    "no such setting": ("UsageError", "NoneType", "colour"),
    "late": ("DistBackendError", "CollectiveTimeoutError", "rank 1 has not called it"),
    "shapes": ("DistBackendError", "MismatchError", f"float32[4], op=sum) at {PROGRAMS / 'failures.py'}:"),
    "afterwards": ("DistBackendError", "AbortedError", "ranks disagree"),
}
WELL = ("leaf", "anomaly mode and profiler", "fork of a loader", "spawn of a loader", "the other group", "a new group")


def test_torch_backend_errors_name_their_cause(tmp_path: Path) -> None:
    for rank, lines in enumerate(lines_of(run("failures", 2, tmp_path, "survived"))):
        told = {line.split("|")[0]: line.split("|")[1:] for line in lines if "|" in line}
        for name, (kind, cause, words) in {**ERRORS, f"fork of {rank}": ("CallError", "UsageError", "forked")}.items():
            kinds, its_cause, text = told[name][:3]
            assert (kind in kinds.split(","), its_cause, words in text) == (True, cause, True), told[name]
        assert {name: told[name] for name in WELL} == {name: ["nothing"] for name in WELL}
        assert " Timed out " in told["late"][2]
        assert all(int(more) <= 0 for more in told["cycles"]), "threads or descriptors stay"


def test_torch_survivors_name_a_rank_that_dies_in_backward(tmp_path: Path) -> None:
    ranks = ended("failures", 3, tmp_path, "death")
    assert [rank.returncode for rank in ranks] == [0, 0, 3], ranks
    for rank in ranks[:2]:
        kinds, _, text, _ = next(line for line in rank.stdout.splitlines() if line.startswith("death|")).split("|")[1:]
        assert "RuntimeError" in kinds.split(",")
        assert "rank 2 died" in text


class FinishedWork:
    """A call that has ended, for a `Work`."""

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        pass

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        callback(self)


def test_future_ends_with_an_error_when_the_result_cannot_be_copied() -> None:
    from unisono.frameworks.torch.calls.work import Work, WorkKeeper

    def fail() -> None:
        raise RuntimeError("no memory left")

    future = Work(FinishedWork(), [], fail, WorkKeeper()).get_future()
    assert eventually(future.done)
    with pytest.raises(RuntimeError, match="no memory left"):
        future.wait()


@pytest.mark.parametrize("elements", [3, 100_000])
def test_work_held_by_cpp_still_answers_after_python_has_dropped_it(elements: int) -> None:
    import torch
    import torch.distributed as dist

    from unisono.frameworks.torch.calls.work import Work, WorkKeeper

    keeper, tensor = WorkKeeper(), torch.ones(elements)

    def held_by_cpp(tensor: Any) -> Any:
        work = Work(FinishedWork(), [tensor], lambda: None, keeper)
        work.wait()
        return work.boxed()

    held = held_by_cpp(tensor)
    for _ in range(100):
        held_by_cpp(tensor)
    assert isinstance(dist.Work.unbox(held), Work)  # otherwise it would wait for ever
    assert dist.Work.unbox(held).wait()
    future = dist.Work.unbox(held).get_future()
    assert future.done()
    assert future.value()[0] is tensor
    del future, tensor
    if elements > 3:  # nobody has the tensor any more: its memory was not kept
        with pytest.raises(RuntimeError, match="results of this work are gone"):
            dist.Work.unbox(held).result()


def test_kept_works_can_be_added_and_dropped_by_many_threads() -> None:
    from unisono.frameworks.torch.calls.work import WorkKeeper

    class Endless:
        def is_completed(self) -> bool:
            return False

    keeper, errors = WorkKeeper(), []

    def keep_and_drop() -> None:
        try:
            works: list[Any] = []
            for _ in range(20_000):
                works.append(Endless())
                keeper.keep(works[-1])
                if len(works) > 100:
                    keeper.release(works.pop(0))
        except RuntimeError as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=keep_and_drop) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert errors == []


def test_importing_torch_registers_the_backend_without_loading_unisono() -> None:
    program = (
        "import torch.distributed as dist, sys; "
        "print(dist.is_backend_available('unisono'), 'unisono.collectives' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_process_group_starts_by_every_init_method_of_torch(tmp_path: Path) -> None:
    ways = ("tcp", "a store, the first time", "a store, the second time", "beside Gloo", "for the CPU")
    expected = [f"{way}: [2.0, 2.0] by 2 ranks" for way in ways]
    for lines in lines_of(run("meetings", 2, tmp_path, str(free_port()))):
        assert without_noise(lines) == expected


@pytest.mark.night
def test_torch_ddp_example_learns_digits_under_torchrun(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "torch_ddp.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(example)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    recognised = done.stdout.splitlines()[-1].removeprefix("recognised: ").removesuffix("%")
    assert int(recognised) > 80
