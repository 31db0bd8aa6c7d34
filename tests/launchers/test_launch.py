from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.deadlines import DEADLINE_S, eventually
from support.own_processes import children

import unisono as un
from unisono.launchers.launch import Pool

pytestmark = pytest.mark.usefixtures("started_ranks_of_pools")


class OwnError(Exception):
    """An exception with special arguments, of a module that the launcher's other processes cannot import."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason} ({code})")
        self.code = code
        self.reason = reason

    def __reduce__(self) -> tuple[type[OwnError], tuple[int, str]]:
        return OwnError, (self.code, self.reason)


@pytest.fixture(autouse=True)
def no_rank_is_left() -> Iterator[None]:
    yield
    assert not children()


def place(comm: un.Communicator) -> tuple[int, int]:
    return comm.rank, comm.size


def process(comm: un.Communicator) -> tuple[int, int]:
    return os.getpid(), id(comm)


def fail_on_rank_1(comm: un.Communicator) -> None:
    if comm.rank == 1:
        raise OwnError(7, "the cause")
    comm.barrier()


def sleep_on_rank_1(comm: un.Communicator) -> int:
    if comm.rank == 1:
        time.sleep(600)
    return comm.rank


def test_launch_returns_results_in_order_of_ranks() -> None:
    assert un.launch(place, 3, timeout_s=DEADLINE_S) == [(0, 3), (1, 3), (2, 3)]


def test_launch_passes_closures_and_large_arrays() -> None:
    factor = 3

    def scaled(comm: un.Communicator, values: Any) -> Any:
        return values * factor * (comm.rank + 1)

    values = np.arange(1 << 20, dtype=np.float64)
    for rank, result in enumerate(un.launch(scaled, 2, values, timeout_s=DEADLINE_S)):
        np.testing.assert_array_equal(result, values * factor * (rank + 1))


def test_launched_ranks_can_allreduce() -> None:
    def total(comm: un.Communicator) -> Any:
        return comm.allreduce(np.ones(4, np.float32))

    for result in un.launch(total, 3, timeout_s=DEADLINE_S):
        np.testing.assert_array_equal(result, np.full(4, 3, np.float32))


def test_binding_and_environment_reach_the_ranks() -> None:
    def place_of_rank(comm: un.Communicator) -> tuple[str | None, str, int]:
        return os.environ.get("OWN"), os.environ["OMP_NUM_THREADS"], len(os.sched_getaffinity(0))

    results = un.launch(place_of_rank, 2, env={"OWN": "value"}, bind="core", timeout_s=DEADLINE_S)
    assert results == [("value", "1", 1)] * 2


def test_options_reach_the_ranks() -> None:
    def level(comm: un.Communicator) -> int:
        return logging.getLogger("unisono").level

    assert un.launch(level, 2, options=un.Options(log="error"), timeout_s=DEADLINE_S) == [logging.ERROR] * 2


def test_launch_raises_the_original_exception_of_the_root_cause() -> None:
    with pytest.raises(OwnError, match="the cause") as raised:
        un.launch(fail_on_rank_1, 3, timeout_s=DEADLINE_S)
    assert raised.value.code == 7
    assert "rank 1: Traceback" in str(raised.value.__cause__)
    assert 'raise OwnError(7, "the cause")' in str(raised.value.__cause__)


def test_launch_raises_runtime_error_with_text_of_unpicklable_exception() -> None:
    def fail(comm: un.Communicator) -> None:
        class LockedError(Exception):
            def __init__(self) -> None:
                super().__init__("locked")
                self.lock = threading.Lock()

        raise LockedError

    with pytest.raises(RuntimeError, match="LockedError: locked") as raised:
        un.launch(fail, 1, timeout_s=DEADLINE_S)
    assert "Traceback" in str(raised.value.__cause__)


def test_launch_raises_type_error_when_result_cannot_be_pickled() -> None:
    with pytest.raises(TypeError, match="pickle"):
        un.launch(lambda comm: threading.Lock(), 1, timeout_s=DEADLINE_S)


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 was killed by SIGKILL"),
        (lambda: sys.exit(3), "rank 1 exited with code 3"),
    ],
)
def test_launch_raises_peer_lost_error_when_a_rank_exits_or_is_killed(end: Any, how: str) -> None:
    def end_on_rank_1(comm: un.Communicator) -> None:
        if comm.rank == 1:
            end()
        comm.barrier()

    with pytest.raises(un.PeerLostError, match=how) as raised:
        un.launch(end_on_rank_1, 2, timeout_s=DEADLINE_S)
    assert raised.value.peer == 1


def test_launch_kills_all_ranks_after_its_timeout() -> None:
    # The other ranks may not have begun when the error comes.
    with pytest.raises(un.CollectiveTimeoutError, match=r"ranks? (0, )?1(, 2)? had not answered"):
        un.launch(sleep_on_rank_1, 3, timeout_s=3.0)


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", True])
def test_launch_refuses_invalid_number_of_ranks(size: Any) -> None:
    with pytest.raises(un.UsageError, match="size must be a positive number of ranks"):
        un.launch(place, size)


def test_launch_refuses_unknown_binding() -> None:
    with pytest.raises(un.UsageError, match="bind must be"):
        un.launch(place, 2, bind="socket")


def test_launch_labels_output_lines_with_their_rank(capsys: pytest.CaptureFixture[str]) -> None:
    def write(comm: un.Communicator) -> None:
        sys.stdout.write(f"out of {comm.rank}\n")
        sys.stderr.write(f"err of {comm.rank}")

    un.launch(write, 2, timeout_s=DEADLINE_S)
    captured = capsys.readouterr()
    assert sorted(captured.out.splitlines()) == ["[0] out of 0", "[1] out of 1"]
    assert sorted(captured.err.splitlines()) == ["[0] err of 0", "[1] err of 1"]


def test_launch_passes_output_lines_to_on_output(capsys: pytest.CaptureFixture[str]) -> None:
    lines = []
    un.launch(
        lambda comm: sys.stdout.write("hello\n"), 2, timeout_s=DEADLINE_S, on_output=lambda *line: lines.append(line)
    )
    assert sorted(lines) == [(0, "stdout", "hello"), (1, "stdout", "hello")]
    assert capsys.readouterr().out == ""


PRINTING = """
import sys
import unisono as un
def write(comm):
    print("\u00b5 " * 50_000)
    return comm.allgather_object(comm.rank)
sys.stderr.write(str(un.launch(write, 2, timeout_s=60, env={"PYTHONIOENCODING": "utf-8"})))
"""


@pytest.mark.parametrize("redirection", [">&-", "| true", "> /dev/full", "> output"])
def test_ranks_keep_running_when_output_is_closed_full_or_unread(tmp_path: Path, redirection: str) -> None:
    (tmp_path / "program.py").write_text(PRINTING)
    command = f"PYTHONIOENCODING=ascii {shlex.quote(sys.executable)} program.py {redirection}"
    completed = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert completed.stderr == "[[0, 1], [0, 1]]"
    if redirection == "> output":
        lines = (tmp_path / "output").read_text().splitlines()
        assert sorted(lines) == [f"[{rank}] {'u ' * 50_000}" for rank in range(2)]


def test_ranks_import_no_module_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("random", "queue", "types", "selectors", "socket"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the file of the user was imported')")
    monkeypatch.chdir(tmp_path)
    assert un.launch(place, 2, timeout_s=DEADLINE_S) == [(0, 2), (1, 2)]


def test_pool_reuses_its_ranks_and_their_communicator() -> None:
    with Pool(2) as pool:
        first = pool.run(process, timeout_s=DEADLINE_S)
        assert pool.run(process, timeout_s=DEADLINE_S) == first
        assert len({pid for pid, _ in first}) == 2
        assert len(children()) == 2


def test_pool_starts_new_ranks_after_a_failure() -> None:
    with Pool(2) as pool:
        before = pool.run(process, timeout_s=DEADLINE_S)
        with pytest.raises(OwnError):
            pool.run(fail_on_rank_1, timeout_s=DEADLINE_S)
        assert not children()
        after = pool.run(process, timeout_s=DEADLINE_S)
        assert not {pid for pid, _ in before} & {pid for pid, _ in after}


def test_pool_keeps_its_ranks_when_function_cannot_be_pickled() -> None:
    lock = threading.Lock()
    with Pool(2) as pool:
        before = pool.run(process, timeout_s=DEADLINE_S)
        with pytest.raises(TypeError, match="pickle"):
            pool.run(lambda comm: lock, timeout_s=DEADLINE_S)
        assert pool.run(process, timeout_s=DEADLINE_S) == before


def test_pool_outlives_the_thread_that_first_used_it() -> None:
    with Pool(2) as pool:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.extend(pool.run(process, timeout_s=DEADLINE_S)))
        thread.start()
        thread.join()
        assert pool.run(process, timeout_s=DEADLINE_S) == results


def test_ranks_end_with_the_process_that_launched_them(tmp_path: Path) -> None:
    marker = str(tmp_path / "marker")
    program = f"""
import time
import unisono as un
def wait(comm, marker):
    open(f"{{marker}}{{comm.rank}}", "w").close()
    time.sleep(600)
un.launch(wait, 2, {marker!r}, env={{"MARKER": {marker!r}}})
"""
    with subprocess.Popen([sys.executable, "-c", program]) as parent:
        try:
            assert eventually(lambda: len(list(tmp_path.iterdir())) == 2)
            assert _with_environment(marker)
        finally:
            parent.kill()
    assert eventually(lambda: not _with_environment(marker))


def _with_environment(text: str) -> list[str]:
    results = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"MARKER={text}".encode() in path.read_bytes():
                results.append(path.parent.name)
        except OSError:
            continue
    return results


def end_with_another_root(comm: un.Communicator) -> None:
    comm.broadcast(np.zeros(4), root=comm.rank)


def test_launch_raises_mismatch_error_of_the_last_call() -> None:
    with pytest.raises(un.MismatchError, match=r"rank 1 called broadcast\(float64\[4\], root=1\)"):
        un.launch(end_with_another_root, 2)
